"""The two collections: how they are made, configured, named, moved, saved and driven by optimizers as TorchRec's users know them."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import kjt
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.optim import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim import apply_optimizer_in_backward as old_apply
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import embcache as ec
from embcache.errors import ConfigError
from embcache.torchrec import (
    AdmitAndEvictConfig,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    InitializerType,
    PolicyType,
    ShowClickParams,
    sparse_optimizer,
)


def bag(name: str = "t", features: list[str] | None = None, **options: Any) -> EmbeddingBagConfig:
    given = {"num_embeddings": 10, "embedding_dim": 4, "feature_names": features or ["f"]} | options
    return EmbeddingBagConfig(name=name, **given)


def rows(collection: Any, table: str, keys: list[int]) -> torch.Tensor:
    return torch.from_numpy(collection.tables()[table].lookup(keys, insert=False))


BATCH = kjt(["f", "g"], [[[1, 2], [3]], [[4], [5, 5]]])


# ---------------------------------------------------------------------------------------------------------------- tables


def test_they_are_torchrecs_modules_and_the_engines() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()])
    emc = EmbCacheEmbeddingCollection([EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4)])
    assert isinstance(ebc, EmbeddingBagCollectionInterface) and isinstance(ebc, ec.EmbeddingBagCollection)
    assert isinstance(emc, EmbeddingCollectionInterface) and isinstance(emc, ec.EmbeddingCollection)
    assert emc.embedding_configs()[0].feature_names == ["t"]


def test_configurations_become_tables() -> None:
    own = EmbCacheEmbeddingBagConfig(
        name="own",
        num_embeddings=20,
        embedding_dim=6,
        feature_names=["g"],
        pooling=PoolingType.MEAN,
        data_type=DataType.FP16,
        admit_and_evict_config=AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=0.5),
        initializer=ec.Constant(2.0),
        seed=7,
        hbm_rows=5,
    )
    stock = bag(data_type=DataType.BF16, weight_init_min=-1.0, weight_init_max=1.0)
    made = EmbCacheEmbeddingBagCollection([own, stock]).table_configs()
    assert made[0] == ec.TableConfig(
        "own",
        6,
        ["g"],
        num_embeddings=20,
        pooling="mean",
        dtype="float16",
        initializer=ec.Constant(2.0),
        seed=7,
        hbm_rows=5,
        admit_and_evict=own.admit_and_evict_config,
    )
    assert made[1].dtype == "bfloat16" and made[1].initializer == ec.Uniform(-1.0, 1.0)
    assert EmbCacheEmbeddingBagCollection([bag(num_embeddings=100)]).table_configs()[0].initializer == ec.Uniform(
        -0.1, 0.1
    )


def test_case_14_an_unbounded_table_starts_from_something() -> None:
    config = EmbCacheEmbeddingConfig(num_embeddings=None, embedding_dim=4, name="t", feature_names=["f"])
    emc = EmbCacheEmbeddingCollection([config])
    assert emc.table_configs()[0].num_embeddings is None
    assert emc(kjt(["f"], [[[2**62]]]))["f"].values().abs().max() > 0.001
    assert next(emc.parameters()).shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"initializer_type": InitializerType.LINEAR}, ec.LinearRamp(0.0, 1.0)),
        ({"initializer_type": "uniform", "weight_init_min": -2.0, "weight_init_max": 2.0}, ec.Uniform(-2.0, 2.0)),
        ({"initializer_type": "TRUNCATED_NORMAL", "weight_init_stddev": 0.5}, ec.TruncatedNormal(0.0, 0.5)),
        ({"init_fn": torch.nn.init.zeros_}, ec.Zeros()),
        ({"init_fn": torch.nn.init.ones_}, ec.Constant(1.0)),
        ({"init_fn": torch.nn.init.normal_}, ec.Normal(0.0, 1.0)),
    ],
)
def test_initial_values_are_said_in_many_ways(options: dict[str, Any], expected: ec.config.Initializer) -> None:
    config = EmbCacheEmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", **options)
    assert EmbCacheEmbeddingBagCollection([config]).table_configs()[0].initializer == expected


def test_a_function_of_the_whole_weight_is_called_with_it() -> None:
    torch.manual_seed(3)
    stock = EmbeddingBagCollection([bag(init_fn=torch.nn.init.xavier_uniform_)])
    ebc = EmbCacheEmbeddingBagCollection([bag(init_fn=torch.nn.init.xavier_uniform_)])
    torch.manual_seed(3)
    torch.empty(10, 4).uniform_()  # TorchRec's module is made with values of its own first
    found = rows(ebc, "t", list(range(10)))
    torch.manual_seed(3)
    expected = torch.nn.init.xavier_uniform_(torch.empty(10, 4))
    assert stock.embedding_bags["t"].weight.shape == found.shape and len(ebc.tables()["t"]) == 10
    torch.manual_seed(3)
    again = EmbCacheEmbeddingBagCollection([bag(init_fn=torch.nn.init.xavier_uniform_)])
    assert torch.equal(rows(again, "t", list(range(10))), expected)


def test_a_function_that_fails_leaves_nothing_half_made() -> None:
    calls = []

    def broken(weight: torch.Tensor) -> None:
        calls.append(weight.shape)
        if len(calls) == 1:
            raise RuntimeError("no luck")
        weight.fill_(2.0)

    ebc = EmbCacheEmbeddingBagCollection([bag(init_fn=broken)])
    with pytest.raises(RuntimeError, match="no luck"):
        ebc.manager  # noqa: B018
    assert not ebc.is_made
    assert rows(ebc, "t", [1]).tolist() == [[2.0] * 4]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (bag(data_type=DataType.INT8), "data_type"),
        (bag(pooling=PoolingType.NONE), "pooling"),
        (bag(need_pos=True), "need_pos"),
        (bag(total_num_buckets=4), "total_num_buckets"),
        (bag(name=""), "name"),
        (bag(embedding_dim=0), "embedding_dim"),
        (EmbeddingConfig(num_embeddings=1, embedding_dim=1, name="t"), "EmbeddingBagConfig"),
        ("t", "EmbeddingBagConfig"),
    ],
)
def test_what_a_cached_table_is_not_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbCacheEmbeddingBagCollection([config])


def test_table_names_are_unique_and_flags_are_flags() -> None:
    with pytest.raises(ValueError, match="'t' twice"):
        EmbCacheEmbeddingBagCollection([bag(), bag()])
    with pytest.raises(ConfigError, match="no tables"):
        EmbCacheEmbeddingBagCollection([])
    with pytest.raises(ConfigError, match="by keyword"):
        EmbCacheEmbeddingBagCollection([bag()], 2, 1024)
    with pytest.raises(ConfigError, match="by keyword"):
        EmbCacheEmbeddingCollection([EmbeddingConfig(num_embeddings=1, embedding_dim=1, name="t")], "cpu", 8)


def test_all_of_torchrecs_arguments_are_taken() -> None:
    """By place, too, and what is asked back is what was given."""
    for stock, own in (
        (EmbeddingBagCollection, EmbCacheEmbeddingBagCollection),
        (EmbeddingCollection, EmbCacheEmbeddingCollection),
    ):
        theirs = list(inspect.signature(stock.__init__).parameters)
        assert list(inspect.signature(own.__init__).parameters)[: len(theirs)] == theirs
    table = EmbeddingConfig(num_embeddings=1, embedding_dim=1, name="t")
    emc = EmbCacheEmbeddingCollection([table], torch.device("cpu"), True, True, {"row_wise": False})
    assert emc.need_indices() and emc.use_gather_select()
    assert emc.use_gather_select_per_sharding() == {"row_wise": False}
    with pytest.raises(ConfigError, match="use_gather_select = 8"):
        EmbCacheEmbeddingCollection([table], "cpu", False, 8)


def test_rec_sdk_calls_go_on_working() -> None:
    ebc = EmbCacheEmbeddingBagCollection(
        [bag(), bag("u", ["g"])],
        world_size=1,
        batch_size=8,
        multi_hot_sizes=[1, 1],
        need_accumulate_offset=True,
        device=torch.device("cpu"),
        embedding_optimizer_cls=torch.optim.Adam,
    )
    assert ebc.manager.spec == ec.Adam(lr=0.001)


def test_filters_of_rec_sdk() -> None:
    assert AdmitAndEvictConfig(admit_threshold=3, evict_step_interval=10) == AdmitAndEvictConfig(admit_threshold=3)
    scored = AdmitAndEvictConfig(
        policy_type=PolicyType.POLICY_SHOWCLICK,
        evict_step_interval=10,
        showclick_params=ShowClickParams(
            alpha=0.5, beta=2.0, admit_threshold=3.0, evict_percentage=0.1, score_decay=0.9
        ),
    )
    assert scored.show_click == ec.ShowClick(0.5, 2.0, 0.9, 0.1) and scored.admit_threshold == 3.0
    off = AdmitAndEvictConfig(admit_threshold=5, evict_threshold=3, evict_step_interval=10, policy_type="NONE")
    assert not off.admits and not off.evicts
    with pytest.raises(ConfigError, match="POLICY_SHOWCLICK"):
        AdmitAndEvictConfig(showclick_params=ShowClickParams())
    with pytest.raises(ConfigError, match="policy_type = 'LRU'"):
        AdmitAndEvictConfig(policy_type="LRU")


def test_case_7_features_of_unequal_length_on_one_table_keep_their_ids() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag(features=["f", "g"], init_fn=torch.nn.init.ones_)])
    assert ebc(kjt(["g", "f"], [[[1, 2, 3], []], [[9], [9, 9]]]))["f"][:, 0].tolist() == [1.0, 2.0]


# ------------------------------------------------------------------------------------------------------------ optimizers


def test_an_applied_optimizer_trains_the_rows() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag(), bag("u", ["g"])])
    model = torch.nn.ModuleDict({"sparse": ebc, "top": torch.nn.Linear(8, 1)})
    apply_optimizer_in_backward(torch.optim.SGD, model["sparse"].parameters(), {"lr": 0.5})
    before = rows(ebc, "t", [1])
    ebc(BATCH).values().sum().backward()
    assert ebc.manager.spec == ec.SGD(lr=0.5)
    torch.testing.assert_close(rows(ebc, "t", [1]), before - 0.5)


def test_torchrecs_older_function_works_too() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old_apply(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.5, "eps": 1e-8})
    assert ebc.manager.spec == ec.Adagrad(lr=0.5, eps=1e-8)


def test_an_optimizer_after_the_tables_is_refused() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()])
    ebc(kjt(["f"], [[[1]]]))
    with pytest.raises(ConfigError, match="before the first forward"):
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})


def test_contradictions_about_the_optimizer_are_refused() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag(), bag("u", ["g"])])
    apply_optimizer_in_backward(torch.optim.SGD, [next(ebc.parameters())], {"lr": 0.5})
    with pytest.raises(ConfigError, match="'t' and 'u'"):
        ebc(BATCH)
    ebc = EmbCacheEmbeddingBagCollection([bag()], optimizer=ec.SGD(lr=0.5))
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.25})
    with pytest.raises(ConfigError, match="give one of them"):
        ebc.manager  # noqa: B018
    ebc = EmbCacheEmbeddingBagCollection([bag()], embedding_optimizer_cls=torch.optim.Adam)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.25})
    with pytest.raises(ConfigError, match="embedding_optimizer_cls"):
        ebc.manager  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, ec.SGD(lr=0.001)),
        (torch.optim.SGD, {"lr": torch.tensor(0.5), "momentum": 0, "foreach": True}, ec.SGD(lr=0.5)),
        (torch.optim.SparseAdam, {"lr": 0.5, "betas": (0.8, 0.9)}, ec.Adam(lr=0.5, betas=(0.8, 0.9))),
        ("torchrec.Adam", {"learning_rate": 0.5, "beta1": 0.8, "beta2": 0.9}, ec.Adam(lr=0.5, betas=(0.8, 0.9))),
        ("torchrec.Adagrad", {"lr": 0.5}, ec.Adagrad(lr=0.5, eps=1e-8)),
        ("torchrec.RowWiseAdagrad", {"lr": 0.5, "weight_decay": 0.1}, ec.RowWiseAdagrad(lr=0.5, weight_decay=0.1)),
    ],
)
def test_optimizers_by_class(kind: Any, options: dict[str, Any], expected: ec.config.OptimizerSpec) -> None:
    import torchrec.optim

    kind = getattr(torchrec.optim, kind.split(".")[1]) if isinstance(kind, str) else kind
    assert sparse_optimizer(kind, options) == expected


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.RMSprop, {}, "RMSprop"),
        (torch.optim.AdamW, {}, "AdamW"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum = 0.9"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (torch.optim.Adagrad, {"lrr": 0.1}, "no argument 'lrr'"),
        (torch.optim.Adagrad, {"lr": -1.0}, "lr = -1.0"),
    ],
)
def test_formulas_that_we_lack_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sparse_optimizer(kind, options)


def test_a_scheduler_of_the_fused_optimizer_reaches_the_rows() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()], optimizer=ec.SGD(lr=0.5))
    fused = ebc.fused_optimizer
    assert isinstance(fused, KeyedOptimizer) and list(fused.params) == ["embedding_bags.t.weight"]
    scheduler = torch.optim.lr_scheduler.StepLR(fused, step_size=1, gamma=0.5)
    expected = rows(ebc, "t", [1])
    for lr in (0.5, 0.25, 0.125):
        fused.zero_grad()
        ebc(kjt(["f"], [[[1]]])).values().sum().backward()
        fused.step()
        scheduler.step()
        expected = expected - lr
        torch.testing.assert_close(rows(ebc, "t", [1]), expected)
    ebc.optimizer.param_groups[0]["lr"] = 0.75
    assert fused.param_groups[0]["lr"] == 0.75 and "lr: 0.75" in repr(fused)


def test_torchrecs_wrappers_of_optimizers_take_it() -> None:
    """Warm-up sets the learning rate of the next update; clipping finds no gradients of tables to clip."""
    ebc = EmbCacheEmbeddingBagCollection([bag()], optimizer=ec.SGD(lr=0.5))
    warming = WarmupOptimizer(ebc.fused_optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=0.5)
    clipped = GradientClippingOptimizer(warming, GradientClipping.NORM, max_gradient=1e-3)
    expected = rows(ebc, "t", [1])
    for lr in (0.0, 0.125, 0.25, 0.375, 0.5, 0.5):
        clipped.zero_grad()
        ebc(kjt(["f"], [[[1]]])).values().sum().backward()
        clipped.step()
        expected = expected - lr
        torch.testing.assert_close(rows(ebc, "t", [1]), expected)


def test_what_dense_optimizers_are_made_of_leaves_tables_out() -> None:
    """TorchRec's own filter, as its examples use it."""
    model = torch.nn.ModuleDict({"rows": EmbCacheEmbeddingBagCollection([bag()]), "top": torch.nn.Linear(4, 1)})
    apply_optimizer_in_backward(torch.optim.Adagrad, model["rows"].parameters(), {"lr": 0.1})
    assert [name for name, _ in in_backward_optimizer_filter(model.named_parameters())] == ["top.weight", "top.bias"]


def test_a_combined_optimizer_holds_it_beside_the_dense_one() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()], optimizer=ec.SGD(lr=0.5))
    top = torch.nn.Linear(4, 1)
    dense = KeyedOptimizerWrapper(dict(top.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    both = CombinedOptimizer([("rows", ebc.fused_optimizer), ("top", dense)])
    assert [group["lr"] for group in both.param_groups] == [0.5, 0.1]
    before = rows(ebc, "t", [1]), top.weight.detach().clone()
    both.zero_grad()
    top(ebc(kjt(["f"], [[[1]]])).values()).sum().backward()
    both.step()
    assert not torch.equal(rows(ebc, "t", [1]), before[0]) and not torch.equal(top.weight, before[1])
    state = both.state_dict()
    both.load_state_dict(state)
    assert set(state["state"]) <= {"top.weight", "top.bias"}
    both.save_param_groups(True)
    state = both.state_dict()
    ebc.optimizer.param_groups[0]["lr"] = 0.25
    both.load_state_dict(state)
    assert ebc.optimizer.param_groups[0]["lr"] == 0.5


# ------------------------------------------------------------------------------------------------- parameters and states


def test_parameters_have_torchrecs_names_and_no_data() -> None:
    stock = EmbeddingBagCollection([bag(), bag("u", ["g"], embedding_dim=6)])
    ebc = EmbCacheEmbeddingBagCollection([bag(), bag("u", ["g"], embedding_dim=6)])
    named = dict(ebc.named_parameters())
    assert {name: one.shape for name, one in named.items()} == {
        name: one.shape for name, one in stock.named_parameters()
    }
    assert all(one.is_meta for one in named.values())
    ebc(BATCH).values().sum().backward()
    assert all(one.grad is None for one in named.values())
    torch.optim.SGD(ebc.parameters(), lr=0.1).step()


def test_a_state_dict_holds_no_table_and_takes_torchrecs() -> None:
    model = torch.nn.ModuleDict({"rows": EmbCacheEmbeddingBagCollection([bag()]), "top": torch.nn.Linear(4, 1)})
    stock = torch.nn.ModuleDict({"rows": EmbeddingBagCollection([bag()]), "top": torch.nn.Linear(4, 1)})
    assert set(model.state_dict()) == {"top.weight", "top.bias"}
    model.load_state_dict(model.state_dict())
    model.load_state_dict(stock.state_dict())
    assert torch.equal(rows(model["rows"], "t", list(range(10))), stock["rows"].embedding_bags["t"].weight)
    assert torch.equal(model["top"].weight, stock["top"].weight)
    wrong = stock.state_dict() | {"rows.embedding_bags.t.weight": torch.zeros(10, 5)}
    with pytest.raises(RuntimeError, match=r"takes \(rows, 4\)"):
        model.load_state_dict(wrong)


def test_case_63_moving_a_model_moves_no_table() -> None:
    model = torch.nn.ModuleDict({"rows": EmbCacheEmbeddingBagCollection([bag()])})
    assert model.to("cpu") is model and model.to(torch.device("cpu")) is model and not model["rows"].is_made
    model["rows"](kjt(["f"], [[[1]]]))
    model.to("cpu")
    assert len(model["rows"].tables()["t"]) == 1
    for made in (model["rows"], EmbCacheEmbeddingBagCollection([bag()])):
        with pytest.raises(ConfigError, match="float32"):
            made.half()


def test_nothing_is_made_on_the_meta_device() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()], device=torch.device("meta"))
    model = torch.nn.ModuleDict({"rows": ebc, "top": torch.nn.Linear(4, 1, device="meta")})
    assert ebc.device.type == "meta"
    with pytest.raises(ConfigError, match="to_empty"):
        ebc(kjt(["f"], [[[1]]]))
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    model.to_empty(device="cpu")
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert ebc.device.type == "cpu"
    model["top"](ebc(kjt(["f"], [[[1]]])).values()).sum().backward()
    assert len(ebc.tables()["t"]) == 1 and ebc.manager.spec == ec.SGD(lr=0.5)
    with pytest.raises(ConfigError, match="hold rows"):
        ebc.reset_parameters()


def test_a_model_is_saved_and_restored_with_its_tables(tmp_path: Path) -> None:
    def model() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {
                "rows": EmbCacheEmbeddingBagCollection([bag(), bag("u", ["g"])], optimizer=ec.Adagrad(lr=0.5)),
                "top": torch.nn.Linear(8, 1),
            }
        )

    first, second = model(), model()
    first["top"](first["rows"](BATCH).values()).sum().backward()
    ec.save(first, tmp_path)
    report = ec.restore(second, tmp_path)
    assert report.matched == ["rows/t", "rows/u"]
    for table in "tu":
        assert torch.equal(rows(first["rows"], table, [1, 4, 5]), rows(second["rows"], table, [1, 4, 5]))
    assert torch.equal(first["top"].weight, second["top"].weight)


def test_tables_go_with_their_collection() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()])
    ebc(kjt(["f"], [[[1]]])).values().sum().backward()
    gone = weakref.ref(ebc.manager)
    gc.collect()
    gc.disable()
    try:
        del ebc
        assert gone() is None
    finally:
        gc.enable()


def test_printing_makes_nothing() -> None:
    ebc = EmbCacheEmbeddingBagCollection([bag()])
    assert "made=False" in repr(ebc) and "t: dim=4" in repr(ebc) and not ebc.is_made


def test_case_55_two_collections_with_equal_table_names_are_two(tmp_path: Path) -> None:
    def model() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {"a": EmbCacheEmbeddingBagCollection([bag()]), "b": EmbCacheEmbeddingBagCollection([bag()])}
        )

    first, second = model(), model()
    batch = kjt(["f"], [[[1]]])
    first["a"](batch).values().sum().backward()
    first["b"](batch).values().sum().neg().backward()
    ec.save(first, tmp_path)
    assert ec.restore(second, tmp_path).matched == ["a/t", "b/t"]
    for path in "ab":
        assert torch.equal(rows(first[path], "t", [1]), rows(second[path], "t", [1]))
    assert not torch.equal(rows(second["a"], "t", [1]), rows(second["b"], "t", [1]))


def test_outputs_are_torchrecs_and_can_be_regrouped() -> None:
    from torchrec import KeyedTensor

    ebc = EmbCacheEmbeddingBagCollection([bag(), bag("u", ["g"], embedding_dim=6)])
    out = ebc(BATCH)
    grouped = KeyedTensor.regroup([out], [["g"], ["f", "g"]])
    assert torch.equal(grouped[0], out["g"]) and torch.equal(grouped[1], torch.cat([out["f"], out["g"]], dim=1))
    grouped[1].sum().backward()
    emc = EmbCacheEmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    )
    part = emc(BATCH)["f"]
    assert [len(one) for one in part.to_dense()] == [2, 1] and part.to_padded_dense(2).shape == (2, 2, 4)


def test_a_tensor_dict_is_taken_as_torchrec_takes_it() -> None:
    from tensordict import TensorDict

    ebc = EmbCacheEmbeddingBagCollection([bag(), bag("u", ["g"])])
    expected = ebc(BATCH).values()
    given = TensorDict({"f": BATCH["f"], "g": BATCH["g"]}, batch_size=[])
    assert torch.equal(ebc(given).values(), expected)
    emc = EmbCacheEmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    )
    assert torch.equal(emc(given)["f"].values(), emc(BATCH)["f"].values())


def test_a_traced_model_has_the_collection_as_one_node() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = EmbCacheEmbeddingBagCollection([bag()])

        def forward(self, batch: Any) -> torch.Tensor:
            return self.rows(batch).values() * 2

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["rows"]
    assert torch.equal(traced(BATCH), model(BATCH))


def test_nobody_makes_a_tensor_of_a_tables_size_of_a_parameter() -> None:
    """DistributedModelParallel puts real tensors in the place of parameters on the meta device."""
    model = torch.nn.ModuleDict(
        {"rows": EmbCacheEmbeddingBagCollection([bag()]), "top": torch.nn.Linear(4, 1, device="meta")}
    )

    def materialize(part: torch.nn.Module) -> None:
        for name, one in part._parameters.items():
            part._parameters[name] = torch.nn.Parameter(torch.zeros_like(one, device="cpu"))

    model.apply(materialize)
    assert not model["top"].weight.is_meta and next(model["rows"].parameters()).is_meta
