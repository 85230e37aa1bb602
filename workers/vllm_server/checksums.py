"""vLLM's own checksums of its parameters, in rlbus's words. Pure."""

from collections.abc import Iterable

from rlbus.schemas import ChecksumsData, TensorSum

# sha256 of nothing: a CPU keeps linear weights prepacked elsewhere and empties the parameter (facts/vllm-cpu.md 5).
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
# Hex digits that are kept: 64 bits of 256.
NUM_DIGITS = 16


def checksums_data(digests: Iterable[tuple[str, str]]) -> ChecksumsData:
    """What `(parameter, sha256)` of all ranks say. Those that vLLM can't see are left out, and counted in the name."""
    pairs = list(digests)
    sums = tuple(TensorSum(name=name, checksum=sha[:NUM_DIGITS]) for name, sha in pairs if sha != EMPTY_SHA256)
    num_blind = len(pairs) - len(sums)
    algorithm = "vllm sha256, first 64 bits"
    if num_blind:
        algorithm += f", {num_blind} prepacked parameters not seen"
    return ChecksumsData(algorithm=algorithm, sums=sums)
