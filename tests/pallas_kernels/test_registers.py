from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.triton import lowering

from mpjax.kernels.launch import Settings, first_program_id, launch, load, store
from mpjax.kernels.registers import MOST_REGISTERS, registers_for

SCHEDULER = 16 * 1024  # a quarter of a multiprocessor's registers


@pytest.mark.parametrize(
    ("programs", "warps", "expected"),
    [(6, 2, 168), (8, 2, 128), (8, 1, 255), (9, 1, 168), (1, 4, 255)],
)
def test_registers_for_programs(programs, warps, expected):
    assert registers_for(programs, warps) == expected


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_so_many_programs_fit(warps):
    for programs in range(1, 32 // warps + 1):
        registers = registers_for(programs, warps)
        threads = 32 * -(-programs * warps // 4)
        assert threads * registers <= SCHEDULER
        more = registers + 8
        assert more > MOST_REGISTERS or threads * more > SCHEDULER


def double(x: jax.Array, registers: int | None, *, interpret: bool) -> jax.Array:
    def kernel(x_ref, out_ref):
        at = first_program_id() + jnp.arange(16)
        store(out_ref.at[at], 2 * load(x_ref.at[at]))

    return launch(
        kernel,
        x,
        out_shape=x,
        grid=(1,),
        settings=Settings("double", registers=registers),
        interpret=interpret,
    )


@pytest.mark.parametrize("registers", [168, 40, MOST_REGISTERS, None])
def test_the_module_says_how_many(registers, lower_for_cuda, monkeypatch):
    """XLA compiles what the module says: of a kernel of 231 it made one of 168."""
    modules, lower = [], lowering.lower_jaxpr_to_triton_module

    def keep(*arguments, **options):
        result = lower(*arguments, **options)
        modules.append(result.module.operation)
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", keep)
    lower_for_cuda(lambda x: double(x, registers, interpret=False), jnp.arange(16))
    [module] = modules
    attributes = dict(module.attributes.items())
    if registers is None:
        assert "ttg.maxnreg" not in attributes
    else:
        assert str(attributes["ttg.maxnreg"]) == f"{registers} : i32"
        assert module.verify()


def test_without_a_gpu_nothing_is_limited():
    x = jnp.arange(16)
    assert (double(x, 40, interpret=True) == 2 * x).all()


@pytest.mark.parametrize("registers", [0, MOST_REGISTERS + 1])
def test_no_thread_has_so_many(registers):
    with pytest.raises(ValueError, match=f"double: {registers} registers: expected 1 to 255"):
        double(jnp.arange(16), registers, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("registers", [40, MOST_REGISTERS, None])
def test_kernels_run_on_the_gpu(registers):
    x = jnp.arange(16)
    assert (double(x, registers, interpret=False) == 2 * x).all()
