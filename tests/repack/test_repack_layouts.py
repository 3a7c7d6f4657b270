"""Packing against a naive loop, its inverse bit for bit, padding, refusals, and the choice of a layout."""

from dataclasses import replace

import naive_layouts as naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import RANKS, SHAPES, assert_same, assert_same_linear, random_linear

from omniw4 import repack
from omniw4.errors import LayoutError, UnsupportedGPUError
from omniw4.ops import activation_shapes, pack_lora_act_ref
from omniw4.ops.layouts import lora_act_shape
from omniw4.repack import mma_s4, mma_s8, wgmma_s8
from omniw4.tensors import LinearSpec

by_layout = pytest.mark.parametrize("layout", repack.LAYOUTS.values(), ids=repack.LAYOUTS.keys())


@by_layout
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rank", RANKS)
def test_unpack_gives_back_every_bit(layout: repack.Layout, n: int, k: int, rank: int) -> None:
    linear = random_linear(n, k, rank, seed=n + k + rank)
    assert_same_linear(layout.unpack(layout.pack(linear), linear.spec, n, k), linear)


@by_layout
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    groups=st.integers(1, 5),
    rank=st.integers(0, 40),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    bias=st.booleans(),
    smooth=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_unpack_inverts_pack_for_any_linear(
    layout: repack.Layout, n: int, groups: int, rank: int, dtype: torch.dtype, bias: bool, smooth: bool, seed: int
) -> None:
    linear = random_linear(n, 64 * groups, rank, seed=seed, dtype=dtype, bias=bias, smooth=smooth)
    packed = layout.pack(linear)
    assert all(tensor.is_contiguous() for tensor in packed.values())
    assert_same_linear(layout.unpack(packed, linear.spec, n, 64 * groups), linear)


@pytest.mark.parametrize(("n", "k"), [(8, 64), (24, 192), (136, 64), (200, 128)])
def test_pack_equals_the_naive_loop(n: int, k: int) -> None:
    linear = random_linear(n, k, 0)
    wanted = {
        mma_s4: naive.mma_s4_weights(linear),
        mma_s8: naive.widened_weights(linear, 64),
        wgmma_s8: naive.wgmma_weights(linear),
    }
    for layout, (qweight, w_scales) in wanted.items():
        packed = layout.pack(linear)
        assert_same(packed["qweight"], qweight, layout.LAYOUT)
        assert_same(packed["w_scales"], w_scales, layout.LAYOUT)


@pytest.mark.parametrize(("n", "rank"), [(8, 8), (136, 16), (200, 40)])
def test_wgmma_proj_up_equals_the_naive_loop(n: int, rank: int) -> None:
    linear = random_linear(n, 64, rank)
    assert linear.proj_up is not None
    assert_same(wgmma_s8.pack(linear)["proj_up"], naive.wgmma_proj_up(linear.proj_up), "proj_up")


@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("m", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("k", [64, 128, 192])
def test_wgmma_activations_equal_the_naive_loop_and_come_back(m: int, k: int, act_bits: int) -> None:
    g = torch.Generator().manual_seed(m + k)
    codes = torch.randint(-128, 128, (m, k), generator=g, dtype=torch.int8)
    a_scales = torch.rand(m, k // 64 if act_bits == 4 else 1, generator=g).half()
    found = wgmma_s8.pack_activations(codes, a_scales, act_bits)
    for name, one, other in zip(
        ("qact", "a_scales"), found, naive.wgmma_activations(codes, a_scales, act_bits), strict=True
    ):
        assert_same(one, other, name)
    shapes = activation_shapes("wgmma_s8", m, k, act_bits, torch.float16)
    assert (found[0].shape, found[0].dtype) == (shapes.qact, shapes.qact_dtype)
    assert (found[1].shape, found[1].dtype) == (shapes.a_scales, shapes.a_scales_dtype)
    back = wgmma_s8.unpack_activations(*found, m, k)
    assert_same(back[0], codes, "codes")
    assert_same(back[1], a_scales, "a_scales")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "rank"), [(1, 8), (16, 16), (17, 96), (40, 256), (3, 0)])
def test_wgmma_lora_act_equals_the_naive_loop_and_comes_back(m: int, rank: int, dtype: torch.dtype) -> None:
    x = random_linear(m, 64, rank, dtype=dtype).proj_up if rank else torch.empty(m, 0, dtype=dtype)
    assert x is not None
    fragments = wgmma_s8.pack_lora_act(x)
    assert_same(fragments, naive.wgmma_lora_act(x), "lora_act")
    assert (tuple(fragments.shape), dtype) == lora_act_shape("wgmma_s8", m, rank, dtype)
    assert_same(wgmma_s8.unpack_lora_act(fragments, m, rank), x, "lora_act")


@pytest.mark.parametrize(
    ("codes", "a_scales", "message"),
    [
        (torch.zeros(4, 32).char(), torch.zeros(4, 1).half(), "K a multiple of 64"),
        (torch.zeros(4, 64).char(), torch.zeros(4, 2).half(), "a_scales has shape"),
        (torch.zeros(4, 64).byte(), torch.zeros(4, 1).half(), "codes has dtype"),
        (torch.zeros(4, 64).char(), torch.zeros(4, 1), "a_scales has dtype"),
    ],
)
def test_wgmma_activations_refuse_what_does_not_fit(codes: torch.Tensor, a_scales: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        wgmma_s8.pack_activations(codes, a_scales, 4)
    with pytest.raises(LayoutError, match=r"lora_act is torch.float32"):
        wgmma_s8.pack_lora_act(torch.zeros(4, 16))


@pytest.mark.parametrize("m", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("k", [64, 192])
def test_activations_equal_the_naive_loop_and_come_back(m: int, k: int) -> None:
    linear = random_linear(m, k, 0)  # any bytes and scales of the right shapes
    fragments, scales = mma_s4.pack_activations(linear.qweight, linear.w_scales)
    assert_same(fragments, naive.mma_s4_activations(linear.qweight), "qact")
    assert_same(scales[:, :m], linear.w_scales.T, "a_scales")
    assert scales.shape == (k // 64, fragments.shape[0] * 16)
    assert not scales[:, m:].any()
    qact, a_scales = mma_s4.unpack_activations(fragments, scales, m)
    assert_same(qact, linear.qweight, "qact")
    assert_same(a_scales, linear.w_scales, "a_scales")


def test_unpacked_activations_do_not_depend_on_the_rows_of_padding() -> None:
    linear = random_linear(5, 64, 0)
    fragments, scales = mma_s4.pack_activations(linear.qweight, linear.w_scales)
    poisoned = mma_s4.pack_activations(torch.full((16, 32), 0xA5, dtype=torch.uint8), torch.full((16, 1), 9.0).half())
    own = mma_s4.pack_activations(torch.full((5, 32), 0xFF, dtype=torch.uint8), torch.ones(5, 1).half())
    fragments = torch.where(own[0] != 0, fragments, poisoned[0])
    scales = torch.where(own[1] != 0, scales, poisoned[1])
    qact, a_scales = mma_s4.unpack_activations(fragments, scales, 5)
    assert_same(qact, linear.qweight, "qact")
    assert_same(a_scales, linear.w_scales, "a_scales")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "rank"), [(1, 8), (16, 16), (17, 96), (40, 256), (3, 0)])
def test_lora_act_equals_the_naive_loop_and_comes_back(m: int, rank: int, dtype: torch.dtype) -> None:
    x = random_linear(m, 64, rank, dtype=dtype).proj_up if rank else torch.empty(m, 0, dtype=dtype)
    assert x is not None
    fragments = mma_s4.pack_lora_act(x)
    assert_same(fragments, naive.lora_act(x), "lora_act")
    assert_same(mma_s4.unpack_lora_act(fragments, m, rank), x, "lora_act")


def test_the_op_that_packs_lora_act_follows_the_same_map() -> None:
    x = torch.randn(21, 40, generator=torch.Generator().manual_seed(5))
    assert_same(pack_lora_act_ref(x, torch.bfloat16), mma_s4.pack_lora_act(x.bfloat16()), "lora_act")


@by_layout
def test_padding_is_zero_and_whole_tiles(layout: repack.Layout) -> None:
    packed = layout.pack(random_linear(layout.N_TILE + 8, 192, 8))
    wide = layout.pack(random_linear(2 * layout.N_TILE, 192, 16))
    assert {name: tensor.shape for name, tensor in packed.items()} == {name: t.shape for name, t in wide.items()}
    half = packed["qweight"].shape[0] // 2
    ones = replace(random_linear(layout.N_TILE + 8, 192, 8), qweight=torch.full((layout.N_TILE + 8, 96), 255).byte())
    filled = layout.pack(ones)["qweight"]
    if layout is wgmma_s8:
        filled = filled[..., :2048]  # scales follow
    assert (filled[:half] == 255).all()
    assert (filled[half:] != 0).sum() == 8 * 96
    if layout is not wgmma_s8:  # there fragments, and held against the naive loop
        assert not packed["proj_down"][:, 8:].view(torch.int16).any()
        assert not packed["proj_up"][layout.N_TILE + 8 :].view(torch.int16).any()
    assert not packed["bias"][layout.N_TILE + 8 :].view(torch.int16).any()


@by_layout
@pytest.mark.parametrize("n", [136, 256])  # padded, and not
def test_strided_tensors_pack_like_contiguous_ones(layout: repack.Layout, n: int) -> None:
    linear = random_linear(n, 192, 16)
    strided = replace(
        linear,
        **{name: torch.stack((tensor, tensor), -1)[..., 0] for name, tensor in linear.tensors().items()},
    )
    assert not any(tensor.is_contiguous() for tensor in strided.tensors().values())
    packed, wanted = layout.pack(strided), layout.pack(linear)
    for name, tensor in wanted.items():
        assert_same(packed[name], tensor, name)
        assert packed[name].is_contiguous(), name
    assert_same_linear(layout.unpack(packed, linear.spec, n, 192), linear)


@by_layout
def test_shapes_are_known_without_the_data(layout: repack.Layout) -> None:
    linear = random_linear(136, 192, 8)
    on_meta = layout.pack(linear.to("meta"))
    for name, tensor in layout.pack(linear).items():
        assert (on_meta[name].shape, on_meta[name].dtype) == (tensor.shape, tensor.dtype), name


@by_layout
@pytest.mark.parametrize("name", ["qweight", "w_scales", "proj_up", "proj_down", "bias"])
def test_unpack_refuses_padding_that_is_not_zero(layout: repack.Layout, name: str) -> None:
    linear = random_linear(24, 64, 8)
    packed = layout.pack(linear)
    # wgmma_s8 has 128 bytes of scales behind the codes of each block
    stored = "qweight" if (layout is wgmma_s8 and name == "w_scales") else name
    damaged = packed[stored].clone()
    damaged.view(-1)[-129 if (layout is wgmma_s8 and name == "qweight") else -1] = 1
    with pytest.raises(LayoutError, match=f"{name} has non-zero padding"):
        layout.unpack({**packed, stored: damaged}, linear.spec, 24, 64)


@by_layout
@pytest.mark.parametrize("name", ["qweight", "w_scales", "proj_up", "proj_down"])
def test_unpack_names_a_missing_tensor_and_a_wrong_shape(layout: repack.Layout, name: str) -> None:
    linear = random_linear(24, 64, 8)
    packed = layout.pack(linear)
    without = {key: tensor for key, tensor in packed.items() if key != name}
    with pytest.raises(LayoutError, match=f"{name} is missing"):
        layout.unpack(without, linear.spec, 24, 64)
    with pytest.raises(LayoutError, match=f"{name} has shape"):
        layout.unpack({**packed, name: packed[name][:-1]}, linear.spec, 24, 64)


@by_layout
@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("qweight", lambda t: t.to(torch.int8), "qweight has dtype torch.int8, wanted torch.uint8"),
        ("qweight", lambda t: t[:, :16], "in_features 32 is not a multiple of 64"),
        ("qweight", lambda t: t.flatten(), "wanted .N, K/2."),
        ("w_scales", lambda t: t.bfloat16(), "w_scales has dtype torch.bfloat16, wanted torch.float16"),
        ("w_scales", lambda t: t.T, r"w_scales has shape \[3, 24\], wanted \[24, 3\]"),
        ("proj_down", lambda t: t[:, :8], r"proj_down has shape \[192, 8\], wanted \[192, 16\]"),
        ("proj_up", lambda t: None, "proj_up is missing although the rank is 16"),
        ("bias", lambda t: t[:8], r"bias has shape \[8\], wanted \[24\]"),
        ("smooth", lambda t: t[:24], r"smooth has shape \[24\], wanted \[192\]"),
    ],
)
def test_pack_refuses_tensors_that_do_not_fit(layout: repack.Layout, name: str, make: object, message: str) -> None:
    linear = random_linear(24, 192, 16)
    with pytest.raises(LayoutError, match=message):
        layout.pack(replace(linear, **{name: make(getattr(linear, name))}))  # type: ignore[operator]


def test_pack_refuses_a_branch_that_the_rank_denies() -> None:
    linear = replace(random_linear(24, 64, 16), spec=LinearSpec(rank=0))
    with pytest.raises(LayoutError, match="proj_down has shape"):
        mma_s4.pack(linear)


@pytest.mark.parametrize(
    ("qact", "a_scales", "message"),
    [
        (torch.zeros(4, 16).byte(), torch.zeros(4, 1).half(), "K a multiple of 64"),
        (torch.zeros(4, 32).byte(), torch.zeros(4, 2).half(), "a_scales has shape"),
        (torch.zeros(4, 32).char(), torch.zeros(4, 1).half(), "qact has dtype"),
        (torch.zeros(4, 32).byte(), torch.zeros(4, 1), "a_scales has dtype"),
    ],
)
def test_pack_activations_refuses_what_does_not_fit(qact: torch.Tensor, a_scales: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        mma_s4.pack_activations(qact, a_scales)


def test_pack_lora_act_refuses_32_bit_elements() -> None:
    with pytest.raises(LayoutError, match=r"lora_act is torch.float32"):
        mma_s4.pack_lora_act(torch.zeros(4, 16))


def test_registry_holds_every_layout_under_its_own_name() -> None:
    assert {name: layout.LAYOUT for name, layout in repack.LAYOUTS.items()} == {
        name: name for name in ("mma_s4", "mma_s8", "wgmma_s8")
    }
    with pytest.raises(LayoutError, match="no layout 'mma_s5'") as e:
        repack.get("mma_s5")
    assert "--layout" in e.value.hint


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        ("80", "mma_s4"),
        ("8.6", "mma_s4"),
        ("sm_87", "mma_s4"),
        ("sm89", "mma_s4"),
        ("sm_90a", "wgmma_s8"),
        ("90", "wgmma_s8"),
        ("10.0", "mma_s8"),
        ("sm_103f", "mma_s8"),
        ("120", "mma_s8"),
        ("12.1", "mma_s8"),
    ],
)
def test_auto_chooses_by_architecture(arch: str, layout: str) -> None:
    capability = repack.parse_arch(arch)
    assert repack.auto(capability) == layout
    assert f"auto chose {layout}:" in repack.explain_auto(capability)


def test_auto_without_a_gpu_is_the_layout_every_gpu_runs() -> None:
    assert repack.auto(None) == "mma_s8"
    assert "--arch" in repack.explain_auto(None)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_auto_refuses_a_gpu_that_is_too_old(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedGPUError, match=f"{capability[0]}.{capability[1]}"):
        repack.auto(capability)


@pytest.mark.parametrize("arch", ["", "hopper", "9", "sm_", "90b", "9.0.1", "-80"])
def test_parse_arch_refuses_what_it_cannot_read(arch: str) -> None:
    with pytest.raises(LayoutError, match="cannot read the GPU architecture"):
        repack.parse_arch(arch)


@pytest.mark.parametrize(
    ("layout", "runs"), [(mma_s4, {4}), (mma_s8, {4, 8}), (wgmma_s8, {4, 8})], ids=lambda v: getattr(v, "LAYOUT", "")
)
def test_layouts_say_which_activation_widths_they_run(layout: repack.Layout, runs: set[int]) -> None:
    for bits in (4, 8, 16):
        reason = layout.unsupported(LinearSpec(act_bits=bits))
        assert (reason == "") == (bits in runs)
        assert reason == "" or (f"{bits} bits" in reason and layout.LAYOUT in reason)
