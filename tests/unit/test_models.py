"""The reference models against direct computations in FP64, and what the trainer and the probe rely on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from loka.errors import UnknownNameError, UsageError
from loka.recsys.batch import Batch, FieldSchema, Ids, Schema
from loka.recsys.models import MODEL_NAMES, PRESET_NAMES, build_model, model_config
from loka.recsys.models.dcnv2 import CrossLayer
from loka.recsys.models.dlrm import dot_interaction
from loka.recsys.models.embeddings import Embeddings, Pooling
from loka.recsys.models.layers import initialize
from loka.recsys.models.wukong import TOWER_L, TOWER_M, WukongLayer, WukongTower, optimized_fm
from loka.sites.mods import mods_of

SCHEMA = Schema(
    dense=tuple(f"d{i}" for i in range(5)),
    fields=(FieldSchema("user", 50), FieldSchema("item", 30), FieldSchema("tags", 20, 4)),
)
TWO_TASKS = Schema(SCHEMA.dense, SCHEMA.fields, ("label", "conversion"))
ALL = [pytest.param(name, id=name) for name in MODEL_NAMES]


def a_batch(rows: int, schema: Schema = SCHEMA, *, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.stack(
        [
            torch.ones(rows, dtype=torch.int64)
            if spec.max_length == 1
            else torch.randint(0, spec.max_length + 1, (rows,), generator=generator)
            for spec in schema.fields
        ]
    )
    values = torch.cat(
        [
            torch.randint(0, spec.cardinality, (int(n),), generator=generator)
            for spec, n in zip(schema.fields, lengths.sum(1), strict=True)
        ]
    )
    dense = torch.randn(rows, len(schema.dense), generator=generator)
    return Batch(dense, Ids.of(values, lengths), torch.zeros(rows))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rows", [0, 1, 18])
@pytest.mark.parametrize("schema", [SCHEMA, TWO_TASKS], ids=["one_task", "two_tasks"])
def test_shapes(name: str, rows: int, schema: Schema) -> None:
    model = build_model(name, schema)
    logits = model(a_batch(rows, schema))
    assert logits.shape == (rows, len(schema.tasks))
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_every_parameter_gets_a_gradient(name: str, preset: str) -> None:
    model = build_model(name, SCHEMA, preset=preset)
    out = model(a_batch(64))
    torch.nn.functional.binary_cross_entropy_with_logits(
        out, (torch.arange(64)[:, None] % 3 == 0).float()
    ).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        grad = p.grad.to_dense()
        assert bool(torch.isfinite(grad).all()), parameter_name
        assert float(grad.abs().max()) > 0, parameter_name


@pytest.mark.parametrize("name", ALL)
def test_a_seed_gives_the_same_weights_and_leaves_the_global_state(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = (build_model(name, SCHEMA, seed=s).state_dict() for s in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[k], same[k]) for k in one)
    drawn = [k for k in one if "norm" not in k and one[k].unique().numel() > 2]
    assert drawn
    assert not any(torch.equal(one[k], other[k]) for k in drawn)
    # No two parameters of one shape start alike.
    for a, b in itertools.combinations(drawn, 2):
        assert one[a].shape != one[b].shape or not torch.equal(one[a], one[b])


def test_parameter_names_and_shapes_are_stable() -> None:
    def listed(name: str) -> dict[str, tuple[int, ...]]:
        return {k: tuple(v.shape) for k, v in build_model(name, SCHEMA).named_parameters()}

    tables = {f"embeddings.bags.{i}.weight": (s.cardinality, 16) for i, s in enumerate(SCHEMA.fields)}

    def linear(name: str, out: int, inp: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
        return {f"tower.{name}.weight": (out, inp)} | ({f"tower.{name}.bias": (out,)} if bias else {})

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f"tower.{name}.weight": (width,), f"tower.{name}.bias": (width,)}

    bottom = linear("bottom.mlp.0", 64, 5) | linear("bottom.mlp.2", 16, 64)
    # 4 embeddings have 6 pairs; 16 + 6 is padded to 32.
    assert listed("dlrm") == tables | bottom | linear("top.0", 128, 32) | linear("top.2", 64, 128) | linear(
        "head.linear", 1, 64
    )
    assert listed("dcnv2") == tables | bottom | linear("crosses.0.linear", 64, 64) | linear(
        "crosses.1.linear", 64, 64
    ) | linear("deep.0", 128, 64) | linear("deep.2", 64, 128) | linear("head.linear", 1, 128)
    wukong = tables | bottom
    for i, n in enumerate((4, 32)):
        at = f"layers.{i}"
        wukong |= linear(f"{at}.fm_projection", 16, n, bias=False) | norm(f"{at}.fmb.0", 16 * n)
        wukong |= linear(f"{at}.fmb.1", 256, 16 * n) | norm(f"{at}.fmb.2.norm", 256)
        wukong |= (
            linear(f"{at}.fmb.3", 256, 256) | norm(f"{at}.fmb.4.norm", 256) | linear(f"{at}.fmb.5", 256, 256)
        )
        wukong |= linear(f"{at}.lcb", 16, n, bias=False) | norm(f"{at}.norm", 16)
        if n != 32:
            wukong |= linear(f"{at}.residual", 32, n, bias=False)
    wukong |= linear("top.0", 256, 512) | norm("top.1.norm", 256) | linear("head.linear", 1, 256)
    assert listed("wukong") == wukong


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16_autocast"])
def test_the_tower_is_one_graph(name: str, autocast: bool) -> None:
    torch.compiler.reset()
    model = build_model(name, SCHEMA, preset="small")
    batch = a_batch(18)
    # A leaf: tracing looks at `.grad` of its inputs, which warns on others.
    embedded = model.embeddings(batch.ids).detach().requires_grad_()
    compiled = torch.compile(model.tower, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = model.tower(batch.dense, embedded), compiled(batch.dense, embedded)
    assert found.dtype == torch.float32
    assert torch.equal(expected, found)
    full = model(batch)
    assert float((expected - full).detach().abs().max()) < (0.05 if autocast else 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_tower_in_bf16_gives_fp32_logits(name: str) -> None:
    model = build_model(name, SCHEMA)
    batch = a_batch(18)
    embedded = model.embeddings(batch.ids).detach()
    expected = model.tower(batch.dense, embedded)
    found = model.tower.bfloat16()(batch.dense.bfloat16(), embedded.bfloat16())
    assert found.dtype == torch.float32
    assert float((found - expected).detach().abs().max()) < 0.05


def test_dot_interaction_is_every_pair_once() -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [[sum(r[i] * r[j]).item() for i in range(5) for j in range(i)] for r in x]
    assert torch.allclose(
        dot_interaction(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("rank", [None, 3])
def test_cross_layer_is_equation_1(rank: int | None) -> None:
    layer = CrossLayer(6, rank).double()
    initialize(layer, seed=1)
    x0, x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = layer.linear.weight if layer.down is None else layer.linear.weight @ layer.down.weight
    expected = torch.empty_like(x)
    for b in range(4):
        for i in range(6):
            expected[b, i] = (
                x0[b, i] * (sum(w[i, j] * x[b, j] for j in range(6)) + layer.linear.bias[i]) + x[b, i]
            )
    assert torch.allclose(layer(x0, x), expected, rtol=1e-12, atol=1e-12)


def test_optimized_fm_is_the_fm() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 5, dtype=torch.float64, generator=generator)
    projection = torch.randn(7, 2, dtype=torch.float64, generator=generator)
    y = x.transpose(1, 2) @ projection
    assert torch.allclose(optimized_fm(x, y), (x @ x.transpose(1, 2)) @ projection, rtol=1e-12, atol=1e-12)


def _norm64(z: Tensor) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("n", [5, 32], ids=["projected_residual", "identity_residual"])
def test_wukong_layer_is_the_papers(n: int) -> None:
    layer = WukongLayer(model_config("wukong"), n).double()
    initialize(layer, seed=2)
    x = torch.randn(3, n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = dict(layer.named_parameters())

    def swish(z: Tensor) -> Tensor:
        return z / (1 + torch.exp(-_norm64(z)))

    fm = torch.einsum("bnd,bmd,km->bnk", x, x, p["fm_projection.weight"])
    h = _norm64(fm.reshape(3, -1))
    h = swish(h @ p["fmb.1.weight"].T + p["fmb.1.bias"])
    h = swish(h @ p["fmb.3.weight"].T + p["fmb.3.bias"])
    fmb = (h @ p["fmb.5.weight"].T + p["fmb.5.bias"]).reshape(3, 16, 16)
    lcb = torch.einsum("ln,bnd->bld", p["lcb.weight"], x)
    residual = x if n == 32 else torch.einsum("ln,bnd->bld", p["residual.weight"], x)
    expected = _norm64(torch.cat([fmb, lcb], 1) + residual)
    assert torch.allclose(layer(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("config", "n", "millions"), [(TOWER_M, 128, 85.1), (TOWER_L, 192, 554.0)], ids=["M", "L"]
)
def test_the_fixed_towers_have_their_sizes(config: object, n: int, millions: float) -> None:
    with torch.device("meta"):
        tower = WukongTower(config, dense_features=0, fields=n, tasks=1)
        out = tower(torch.empty(2, 0), torch.empty(2, n, config.dim))
    assert out.shape == (2, 1)
    assert round(sum(p.numel() for p in tower.parameters()) / 1e6, 1) == millions


def test_published_sizes() -> None:
    criteo = Schema(tuple(f"I{i}" for i in range(13)), tuple(FieldSchema(f"C{i}", 100) for i in range(26)))
    dlrm = build_model("dlrm", criteo, preset="published", device="meta")
    assert dlrm.tower.top[0].in_features == 479
    dcn = build_model("dcnv2", criteo, preset="published", device="meta")
    assert tuple(dcn.tower.crosses[0].down.weight.shape) == (512, 3456)
    assert tuple(dcn.tower.crosses[2].linear.weight.shape) == (3456, 512)
    wukong = build_model("wukong", criteo, preset="published", device="meta")
    assert len(wukong.tower.layers) == 4
    # Six operations a weight and example, forward and backward; products over features see all 128 columns.
    tower = wukong.tower
    linears = [m for m in tower.modules() if isinstance(m, torch.nn.Linear)]
    over_features = {
        id(m) for layer in tower.layers for m in layer.modules() if getattr(m, "bias", 1) is None
    }
    flops = sum(6 * m.weight.numel() * (128 if id(m) in over_features else 1) for m in linears)
    flops += sum(3 * 2 * n * 128 * 24 for n in (27, 64, 64, 64))
    assert flops / 1e9 == pytest.approx(0.43, abs=0.01)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_pooling(pooling: Pooling) -> None:
    embeddings = Embeddings([FieldSchema("tags", 6, 3)], dim=2, pooling=pooling)
    table = torch.arange(12.0).reshape(6, 2)
    embeddings.bags[0].weight.data.copy_(table)
    ids = Ids.of(torch.tensor([1, 2, 2, 5]), torch.tensor([[3, 0, 1]]))
    total = table[1] + 2 * table[2]
    expected = torch.stack([total if pooling is Pooling.SUM else total / 3, torch.zeros(2), table[5]])
    out = embeddings(ids)
    assert torch.allclose(out[:, 0], expected)
    out.sum().backward()
    grad = embeddings.bags[0].weight.grad
    assert grad is not None
    assert grad.is_sparse


@pytest.mark.parametrize("name", ALL)
def test_without_dense_features(name: str) -> None:
    model = build_model(name, Schema((), SCHEMA.fields))
    assert model(a_batch(7, model.schema)).shape == (7, 1)
    assert not any("bottom" in k for k, _ in model.named_parameters())


def test_sparse_and_dense_parameters_are_all_of_them() -> None:
    for name in MODEL_NAMES:
        model = build_model(name, SCHEMA)
        sparse, dense = list(model.sparse_parameters()), list(model.dense_parameters())
        assert [id(p) for p in sparse + dense] == [id(p) for p in model.parameters()]
        assert len(sparse) == len(SCHEMA.fields)


def test_widths_of_the_unquoted_presets_suit_fp8() -> None:
    for name, preset in itertools.product(MODEL_NAMES, ("tiny", "small")):
        config = model_config(name, preset=preset)
        widths = [config.dim, *config.bottom]
        for key in ("top", "deep"):
            widths += getattr(config, key, ())
        for key in ("fmb_hidden", "fmb_outputs", "lcb_outputs", "rank"):
            widths += [getattr(config, key, None) or 16]
        assert all(w % 16 == 0 for w in widths), (name, preset)
        if name == "wukong":
            assert all(w % 256 == 0 for w in (config.fmb_hidden, *config.top))


def test_names_that_do_not_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model `dlmr`[\s\S]*did you mean `dlrm`"):
        build_model("dlmr", SCHEMA)
    with pytest.raises(UnknownNameError, match="unknown preset `huge` in model `dlrm`"):
        build_model("dlrm", SCHEMA, preset="huge")
    with pytest.raises(UnknownNameError, match="unknown option `dims` in WukongConfig"):
        model_config("wukong", overrides={"dims": 3})
    assert PRESET_NAMES == ("tiny", "small", "published")


def test_configurations_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="`dlrm` takes a DLRMConfig, got a WukongConfig"):
        build_model("dlrm", SCHEMA, config=model_config("wukong"))
    for name, overrides in (("dlrm", {"dim": 0}), ("dcnv2", {"rank": -1}), ("wukong", {"top": (256, 2.5)})):
        with pytest.raises(UsageError, match=f"`{next(iter(overrides))}` of .* expected a positive integer"):
            build_model(name, SCHEMA, config=model_config(name, overrides=overrides))
    with pytest.raises(UsageError, match="cannot be built from 1 id fields, 0 dense features and 1 tasks"):
        build_model("dlrm", Schema((), SCHEMA.fields[:1]))
    with pytest.raises(UsageError, match="the batch has 3 id fields, the model was built for 2"):
        build_model("dlrm", Schema((), SCHEMA.fields[:2]))(a_batch(2))


def test_overrides_replace_part_of_a_preset() -> None:
    config = model_config("dcnv2", preset="small", overrides={"rank": None, "dim": 32})
    model = build_model("dcnv2", SCHEMA, config=config)
    assert model.tower.crosses[0].down is None
    assert model.embeddings(a_batch(2).ids).shape == (2, 3, 32)


def test_mods_are_put_in_before_the_weights_are_set() -> None:
    """What both models have in common starts from the same weights."""
    names = ("no_bias", "block_norm.64", "hard_swish")
    plain, changed = build_model("wukong", SCHEMA), build_model("wukong", SCHEMA, mods=names)
    assert mods_of(changed) == ("block_norm.64", "hard_swish", "no_bias")
    assert mods_of(plain) == ()
    weights = plain.state_dict()
    for name, tensor in changed.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert not any(p.is_meta for p in changed.parameters())
