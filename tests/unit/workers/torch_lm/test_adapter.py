"""LoRA on the small model: equal to the merged weights, read from PEFT's files or refused, per row of a batch."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterError  # noqa: E402
from rlbus.workers.torch_lm.adapter import LoraBatch, read_adapter  # noqa: E402
from rlbus.workers.torch_lm.generate import Generation  # noqa: E402
from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model, merge_tiny_adapter  # noqa: E402
from rlbus.workers.torch_lm.model import load_model  # noqa: E402
from rlbus.workers.torch_lm.sampling import Sampling  # noqa: E402

pytestmark = pytest.mark.unit


def test_adapter_on_one_row_equals_the_merged_model_and_leaves_the_others_alone(tmp_path: Path) -> None:
    """Two adapters and the base model in one batch."""
    folder = make_tiny_model(tmp_path / "model")
    model = load_model(folder)
    adapters = [make_tiny_adapter(tmp_path / f"a{n}", folder, seed=n) for n in (1, 2)]
    merged = [load_model(merge_tiny_adapter(tmp_path / f"m{n}", folder, a)) for n, a in enumerate(adapters)]
    tokens = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    lora = LoraBatch.of(
        [read_adapter(adapters[0], model.projections), None, read_adapter(adapters[1], model.projections)]
    )
    pool = model.new_pool(4)
    slots = torch.tensor([pool.take() for _ in range(3)])
    positions = torch.arange(20).expand(3, 20)
    found = model.step(tokens, positions, slots, pool, lora)
    with torch.no_grad():
        expected = [m(tokens[i : i + 1])[0, -1] for i, m in ((0, merged[0]), (1, model), (2, merged[1]))]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], model(tokens[:1])[0, -1], atol=1e-2)


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **changes}))

    return edit


def _rename(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        save_file({name.replace(old, new): t for name, t in tensors.items()}, folder / WEIGHTS_FILE)

    return edit


def _drop(part: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        save_file({name: t for name, t in tensors.items() if part not in name}, folder / WEIGHTS_FILE)

    return edit


def _truncate(folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_edit_config(use_dora=True), "use_dora"),
        (_edit_config(bias="all"), "bias"),
        (_edit_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_edit_config(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (_edit_config(r=8), "shape"),
        (_edit_config(r=0), "no rank"),
        (_edit_config(peft_type="IA3"), "peft_type"),
        (_rename("q_proj", "x_proj"), "belongs to nothing"),
        (_drop("layers.1.mlp.up_proj.lora_B"), "is missing"),
        (_drop("lora_"), "no tensors"),
        (_truncate, "no complete safetensors"),
        (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "no JSON object"),
        (lambda folder: (folder / CONFIG_FILE).unlink(), "can't be read"),
        (lambda folder: (folder / CONFIG_FILE).write_text("[" * 100_000), "can't be read"),
    ],
)
def test_what_cannot_be_applied_exactly_is_refused(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    """With a word on what it is."""
    folder = make_tiny_model(tmp_path / "model")
    adapter = make_tiny_adapter(tmp_path / "adapter", folder, seed=1)
    spoil(adapter)
    with pytest.raises(AdapterError, match=words):
        read_adapter(adapter, load_model(folder).projections)


def test_rank_stabilised_scale_is_that_of_the_square_root(tmp_path: Path) -> None:
    """alpha / sqrt(r)."""
    folder = make_tiny_model(tmp_path / "model")
    adapter = make_tiny_adapter(tmp_path / "adapter", folder, seed=1, rank=4)
    projections = load_model(folder).projections
    plain = read_adapter(adapter, projections)
    _edit_config(use_rslora=True)(adapter)
    stable = read_adapter(adapter, projections)
    for key, (a, b) in plain.parts.items():
        assert torch.equal(stable.parts[key][0], a)
        torch.testing.assert_close(stable.parts[key][1], 2 * b)


def test_an_adapter_whose_load_was_cancelled_never_appears_later(tmp_path: Path, monkeypatch: Any) -> None:
    """A step was running, so it wasn't in the list yet; nobody would look for it again."""
    folder = make_tiny_model(tmp_path / "model")
    model = load_model(folder)
    found = read_adapter(make_tiny_adapter(tmp_path / "a", folder, seed=1), model.projections)
    generation = Generation(model)
    is_in, may_end, step = threading.Event(), threading.Event(), model.step

    def slow(*args: Any) -> Any:
        is_in.set()
        may_end.wait()
        return step(*args)

    monkeypatch.setattr(model, "step", slow)

    async def main() -> None:
        sampling = Sampling(max_tokens=2, temperature=0, ignores_eos=True)
        generating = asyncio.ensure_future(generation.generate((10, 11), sampling))
        await asyncio.to_thread(is_in.wait)
        adding = asyncio.ensure_future(generation.add_adapter("policy", 7, found, None))
        await asyncio.sleep(0)
        adding.cancel()
        await asyncio.wait({adding})
        assert generation.adapter_counts() == ()
        may_end.set()
        await generating
        assert generation.adapter_counts() == ()

    generation.start()
    try:
        asyncio.run(main())
    finally:
        may_end.set()
        generation.close()
