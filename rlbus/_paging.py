"""The controller's view of a fleet, put together from its pages: all of a large fleet doesn't fit into one message."""

from collections.abc import Awaitable, Callable

import msgspec

from rlbus.schemas import FleetView, WorkerId

# Workers that are asked for at once. What one tells takes about 1.3 kB, a message at most 1 MB; and the controller
# stands still while it writes a page.
PAGE_WORKERS = 250
# How often all pages are asked for because the fleet has changed between two of them.
MAX_PASSES = 4

# Asks for the page after a worker; None: for the first one.
AskPage = Callable[[WorkerId | None], Awaitable[FleetView]]


async def whole_view(first: FleetView, ask_page: AskPage) -> FleetView:
    """`first` and all that comes after it, as one view.

    When another controller leads on the way, or the fleet's version changes, the pages would contradict each other, and
    all are asked for anew; after MAX_PASSES they are taken as they are. Raises, Cancel: as `ask_page`.
    """
    for num_left in reversed(range(MAX_PASSES)):
        pages = [first]
        while (after := pages[-1].next) is not None and (num_left == 0 or _is_one_fleet(pages)):
            pages.append(await ask_page(after))
        if num_left == 0 or _is_one_fleet(pages):
            break
        first = await ask_page(None)
    members = tuple(member for page in pages for member in page.members)
    return msgspec.structs.replace(pages[-1], members=members, loras=pages[0].loras, next=None)


def _is_one_fleet(pages: list[FleetView]) -> bool:
    return (pages[0].term, pages[0].version) == (pages[-1].term, pages[-1].version)
