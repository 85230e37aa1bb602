"""What an engine with a draft model has to do with it: the same checks on fake, vLLM and the sidecars of its servers.

Each test begins with a running engine without a group and leaves it so; both its models are complete, of any version.
"""

import asyncio
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest

from rlbus.errors import FaultError, ManifestError
from rlbus.schemas import DRAFT_ROUTE, ChecksumsData, FaultCode, Version
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.contract import (
    A,
    B,
    CaseRunner,
    EngineCase,
    OpenedEngine,
    grouped,
    new_epoch,
    paused,
    tokens,
    transfer,
    update,
)
from rlbus.workers.engines.contract_draft import OpenedDraftEngine, draft, draft_order, transfer_draft, update_draft
from rlbus.workers.engines.found import Found
from tests.engines.drafting import CASES, TARGET, TWIN, Drafting, Outliving
from tests.engines.params import params_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=params_of(CASES))
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    """The opened engine of one case."""
    case: EngineCase = request.param
    if needs := case.needs():
        pytest.fail(f"{case.name} {needs}, and PEERS_REQUIRED is set", pytrace=False)
    runner = CaseRunner(case, tmp_path_factory.mktemp(f"draft-{case.name}"))
    try:
        runner.start()
        yield runner
    finally:
        runner.close()


def having(opened: OpenedEngine) -> OpenedDraftEngine:
    assert DRAFT_ROUTE in opened.engine.info.routes
    return cast(OpenedDraftEngine, opened)


def has(found: ChecksumsData, expected: dict[str, str]) -> bool:
    """Whether the engine's draft holds these tensors."""
    return bool(expected) and expected.items() <= {one.name: one.checksum for one in found.sums}.items()


async def cut_short(opened: OpenedDraftEngine, is_draft: bool) -> None:
    """A transfer of either, whose trainer dies before the last tensor."""
    async with grouped(opened) as epoch:
        if is_draft:
            await transfer_draft(opened, epoch, Version(step=8), num_tensors=len(opened.draft_tensors()) - 1)
        else:
            await transfer(opened, epoch, B, num_tensors=len(opened.tensors()) - 1)


def test_manifest_of_a_draft_is_checked_against_the_draft(drafting: CaseRunner) -> None:
    """That of the target isn't the draft's, nor the reverse, and the first bad tensor is named."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        good = opened.draft_tensors()
        draft(opened).check_draft_manifest(good)
        with pytest.raises(ManifestError):
            draft(opened).check_draft_manifest(opened.tensors())
        with pytest.raises(ManifestError):
            opened.engine.check_manifest(good)
        bad = msgspec.structs.replace(good[-1], shape=(*good[-1].shape[:-1], good[-1].shape[-1] + 1))
        with pytest.raises(ManifestError) as caught:
            draft(opened).check_draft_manifest((*good[:-1], bad))
        assert caught.value.tensor == bad.name

    drafting.run(check)


def test_update_of_the_draft_arrives_and_changes_no_token(drafting: CaseRunner) -> None:
    """What the draft holds is what was sent; the target's weights, label and tokens are what they were."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        await update(opened, A)
        expected, target = await tokens(opened, 24), await opened.engine.checksums()
        label = (await opened.engine.observe()).weight_version
        for version in (Version(step=3), Version(step=7)):
            await update_draft(opened, version)
            found = await draft(opened).draft_checksums()
            assert has(found, opened.sums_of(version))
            assert await tokens(opened, 24) == expected
            assert await opened.engine.checksums() == target
            assert (await opened.engine.observe()).weight_version == label
        assert not has(found, opened.sums_of(Version(step=3)))

    drafting.run(check)


def test_update_of_the_target_leaves_the_draft(drafting: CaseRunner) -> None:
    """The reverse: other tokens, the same draft. Also after an update of the draft, over the same group or not."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        await update(opened, A)
        first = await tokens(opened)
        await update_draft(opened, Version(step=3))
        before = await draft(opened).draft_checksums()
        await update(opened, B)
        assert await tokens(opened) != first
        assert await draft(opened).draft_checksums() == before
        await update(opened, A)
        assert await tokens(opened) == first

    drafting.run(check)


def test_draft_that_got_no_byte_is_what_it_was(drafting: CaseRunner) -> None:
    """A transfer without a group fails untouched, and the next one succeeds."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        await update_draft(opened, Version(step=3))
        before = await draft(opened).draft_checksums()
        async with paused(opened):
            with pytest.raises(UpdateFailedError) as caught:
                await opened.engine.receive_weights(
                    draft_order(opened, new_epoch(), Version(step=4)), lambda: None, lambda done, total: None
                )
            assert not caught.value.weights_touched
            await opened.engine.abort_update()
        assert await draft(opened).draft_checksums() == before
        await update_draft(opened, Version(step=5))
        assert has(await draft(opened).draft_checksums(), opened.sums_of(Version(step=5)))

    drafting.run(check)


def test_draft_that_was_torn_is_healed_by_a_whole_one(drafting: CaseRunner) -> None:
    """The trainer dies in the middle: said to be touched; the target is untouched by it, and not called torn."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        await update(opened, A)
        expected, target = await tokens(opened, 24), await opened.engine.checksums()
        async with paused(opened):
            with pytest.raises(UpdateFailedError) as caught:
                await cut_short(opened, is_draft=True)
            assert caught.value.weights_touched
            await opened.engine.abort_update()
            assert await opened.engine.checksums() == target
            assert (await opened.engine.observe()).weight_version == str(A)
            assert not has(await draft(opened).draft_checksums(), opened.sums_of(Version(step=8)))
        await update_draft(opened, Version(step=9))
        assert has(await draft(opened).draft_checksums(), opened.sums_of(Version(step=9)))
        assert await tokens(opened, 24) == expected

    drafting.run(check)


@pytest.mark.parametrize("is_draft", [True, False])
def test_next_sidecar_of_a_server_is_told_which_of_the_two_the_one_before_has_torn(
    drafting: CaseRunner, is_draft: bool
) -> None:
    """It was killed in mid transfer, with vLLM's session open. The other one is what it was, and keeps its label."""

    async def check(opened: OpenedEngine) -> None:
        if not isinstance(opened, Outliving):
            return
        either, first = having(opened), Version(step=3)
        await update(either, A)
        await update_draft(either, first)
        await opened.follow()
        assert opened.found == Found(str(A), False, False, draft_label="0.3")
        async with paused(either):
            with pytest.raises(UpdateFailedError) as caught:
                await cut_short(either, is_draft)
            assert caught.value.weights_touched
            await opened.follow()
            if is_draft:
                assert opened.found == Found(str(A), True, False, draft_label="torn", is_draft_torn=True)
            else:
                assert opened.found == Found("torn", True, is_torn=True, draft_label="0.3")
            assert has(await draft(either).draft_checksums(), either.sums_of(first)) is not is_draft
        await update_draft(either, Version(step=9))
        await update(either, A)
        await opened.follow()
        assert opened.found == Found(str(A), False, False, draft_label="0.9")

    drafting.run(check)


def test_draft_can_be_asked_for_its_checksums_while_requests_run(drafting: CaseRunner) -> None:
    """Beside generation and within its own update; a request goes on, and an update afterwards finds no session."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        running = asyncio.ensure_future(tokens(opened, 100))
        first, second = await asyncio.gather(draft(opened).draft_checksums(), draft(opened).draft_checksums())
        assert first == second
        assert len(await running) == 100
        async with paused(opened), grouped(opened) as epoch:
            received, sent = await transfer_draft(opened, epoch, Version(step=6))
            assert received.sums == sent
            await opened.engine.finish_update(Version(step=6))
            assert has(await draft(opened).draft_checksums(), opened.sums_of(Version(step=6)))

    drafting.run(check)


def test_vllm_drafts_with_what_it_was_given(drafting: CaseRunner) -> None:
    """A draft that is the target's twin is accepted always, a random one hardly ever; the tokens are the same."""

    async def check(opened: OpenedEngine) -> None:
        if not isinstance(opened, Drafting):
            return
        await update(opened, TARGET)
        expected, accepted = await tokens(opened, 60), []
        for version in (Version(step=9), TWIN):
            await update_draft(opened, version)
            before = await opened.num_drafted()
            assert await tokens(opened, 60) == expected
            drafted, taken = (new - old for new, old in zip(await opened.num_drafted(), before, strict=True))
            accepted.append(taken / drafted)
        assert accepted[0] < 0.5
        assert accepted[1] > 0.9

    drafting.run(check)


def test_open_update_of_the_target_is_not_disturbed_by_a_look_at_the_draft(drafting: CaseRunner) -> None:
    """Refused as busy where the engine can't look then; the update goes on to its end."""

    async def check(opened: OpenedEngine) -> None:
        opened = having(opened)
        async with paused(opened), grouped(opened) as epoch:
            received, sent, _ = await transfer(opened, epoch, B)
            assert received.sums == sent
            codes: list[FaultCode] = []
            try:
                await draft(opened).draft_checksums()
            except FaultError as exc:
                codes.append(exc.code)
            assert codes in ([], [FaultCode.BUSY])
            await opened.engine.finish_update(B)
            await opened.engine.flush_cache()
        assert (await opened.engine.observe()).weight_version == str(B)

    drafting.run(check)
