"""The fake engine's draft model: tensors of their own, which no token depends on (exact rejection sampling)."""

from collections.abc import Sequence

from rlbus.schemas import ChecksumsData, TensorSpec, TensorSum, Version
from rlbus.transfer.fake import fake_sum
from rlbus.transfer.manifest import compare


class WithDraft:
    """What makes the fake engine a `DraftEngine`; mixed into it. Without `draft_tensors` it has no draft model."""

    draft_tensors: tuple[TensorSpec, ...]
    # Which version each tensor's bytes belong to.
    draft_held: dict[str, Version]

    def _note(self, verb: str) -> object:
        raise NotImplementedError

    async def _play(self, verb: str) -> None:
        raise NotImplementedError

    def check_draft_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `DraftEngine`."""
        self._note("check_draft_manifest")
        compare(self.draft_tensors, tensors)

    async def draft_checksums(self) -> ChecksumsData:
        """See `DraftEngine`."""
        await self._play("draft_checksums")
        held = self.draft_held
        sums = (TensorSum(name=t.name, checksum=fake_sum(t.name, held[t.name], t.shape)) for t in self.draft_tensors)
        return ChecksumsData(algorithm="fake", sums=tuple(sums))
