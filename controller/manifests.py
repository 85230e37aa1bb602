"""The manifests that trainers have told this controller, and their pages for workers that lack them."""

from collections.abc import Sequence

from rlbus.codec import MAX_MESSAGE_BYTES
from rlbus.controller.causes import fault
from rlbus.errors import RLBusError
from rlbus.schemas import Fault, FaultCode, ManifestPage, TensorSpec
from rlbus.transfer.manifest import ManifestBook, pages

# A page of a manifest stays at half of what one message may have, as rlbus.codec advises.
PAGE_BYTES = MAX_MESSAGE_BYTES // 2


class Manifests:
    """What was told, by digest."""

    def __init__(self) -> None:
        self._book = ManifestBook()
        # Pages of the manifest that was used last, cut once.
        self._pages: tuple[ManifestPage, ...] = ()

    def put(self, page: ManifestPage) -> Fault | None:
        """Take one page; why it isn't taken."""
        try:
            self._book.add(page)
        except RLBusError as exc:
            return fault(FaultCode.BAD_MESSAGE, str(exc))
        return None

    def get(self, digest: str) -> tuple[TensorSpec, ...] | None:
        """The tensors of a manifest; None: some page of it wasn't told (or is forgotten)."""
        return self._book.get(digest)

    def pages_of(self, digest: str, tensors: Sequence[TensorSpec]) -> tuple[ManifestPage, ...]:
        """The pages of a manifest."""
        if not self._pages or self._pages[0].digest != digest:
            self._pages = pages(tensors, PAGE_BYTES)
        return self._pages
