"""Reads a sharded module as a source on two ranks; for test_sharded_source.py. Arguments: rank and port."""

import json
import sys

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlbus.transfer.source import weight_source


def main() -> None:
    torch.set_num_threads(1)
    rank, port = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Module()
    full = torch.arange(10.0).view(5, 2)
    module.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    module.tied = module.weight
    module.plain = nn.Parameter(torch.ones(1))
    source = weight_source(module)
    specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in source.specs()]
    pairs = weight_source(list(module.named_parameters()))
    assert source.is_shared  # type: ignore[attr-defined]
    assert pairs.is_shared  # type: ignore[attr-defined]
    assert not weight_source({"plain": module.plain}).is_shared  # type: ignore[attr-defined]
    print(json.dumps({"specs": specs, "values": {name: tensor.tolist() for name, tensor in source}}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
