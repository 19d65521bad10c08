"""Makes a model whose weights lie on no grid out of one whose weights do: the same function, other numbers.

    python benchmarks/off_grid.py MODEL OUT

The weights of the SmolLM2 that octavo fetches were 4-bit once, and rounding them to 4 bits anew finds the old grid,
which says nothing of other models. The weights of every input of a linear are multiplied with a factor from 0.5 to 2,
and what makes the input is divided by it (as `octavo quantize` does with better factors): no group is on a grid then.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np

from octavo.models.registry import build_graph
from octavo.ptq.formats.layout import WrittenTensor
from octavo.ptq.layer import LayerResult, absorb
from octavo.ptq.linears import layer_plans
from octavo.ptq.state import outgoing
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.safetensors_writing import write_sharded
from octavo.weights.tensors import f32_to_bf16

SEED = 0


def off_grid(model: Path, out: Path) -> None:
    """Write the other model as bf16."""
    checkpoint = open_checkpoint(model)
    weights = {name: np.array(checkpoint.tensor(name).read_f32(), np.float32) for name in checkpoint.names()}
    rng = np.random.default_rng(SEED)
    for plan in layer_plans(build_graph(checkpoint.config)):
        for group in plan.groups:
            if group.absorber is None:
                continue
            factors = np.exp2(rng.uniform(-1, 1, group.k)).astype(np.float32)
            if group.absorber.heads is not None:
                q_heads, kv_heads, head_dim = group.absorber.heads
                shared = factors.reshape(kv_heads, q_heads // kv_heads, head_dim)[:, :1]
                factors = np.broadcast_to(shared, (kv_heads, q_heads // kv_heads, head_dim)).reshape(-1)
            for name in group.weights:
                weights[name] = weights[name] * factors
            absorb(group.absorber, factors, weights, weights, LayerResult())
    out.mkdir(parents=True)
    write_sharded(out, [outgoing(name, WrittenTensor("BF16", f32_to_bf16(w))) for name, w in weights.items()])
    for file in sorted(model.glob("*.json")):
        shutil.copyfile(file, out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    arguments = parser.parse_args()
    off_grid(arguments.model, arguments.out)


if __name__ == "__main__":
    main()
