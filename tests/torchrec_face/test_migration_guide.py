"""docs/migrate.md: its Python runs as it is printed, and it has a row for each name of RecSDK's and TorchRec's that the face takes."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

import embcache as ec
import embcache.torchrec as face

GUIDE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guides_code_runs_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one session, as a reader would."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "guide"}
    for number, block in enumerate(BLOCKS):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"block {number} of the guide", "exec"), names)
        assert printed.getvalue().splitlines() == re.findall(r"#> (.*)", block), block
    assert len(BLOCKS) >= 9


@pytest.mark.parametrize(
    "kind",
    [
        face.EmbCacheEmbeddingBagCollection,
        face.EmbCacheEmbeddingCollection,
        face.EmbCacheTrainPipelineSparseDist,
        face.EmbCacheEmbeddingBagCollectionSharder,
        face.AdmitAndEvictConfig,
        ec.AdmitAndEvictConfig,
        face.ShowClickParams,
        face.replace_embeddings,
    ],
)
def test_every_argument_has_a_place_in_the_guide(kind: Any) -> None:
    for name in inspect.signature(kind).parameters:
        assert name in ("features", "tables", "self", "options", "policy", "show_click") or re.search(
            rf"\b{name}\b", GUIDE
        ), name


def test_every_environment_variable_and_option_of_rec_sdk_is_named() -> None:
    for name in (
        "EMBCACHE_SIZE_ON_DEVICE_MEM EMBCACHE_SIZE_ON_HBM ENABLE_FAST_HASHMAP FAST_HASHMAP_RESERVE_BUCKET_NUM EMB_MEMORY_POOL_SIZE "
        "EMB_MEMORY_POOL_THREAD_NUM DO_EC_LOCAL_UNIQUE LOCAL_UNIQUE_PARALLEL_BATCH_NUM ENABLE_PARALLEL_GLOBAL_UNIQUE INPUT_DIST_THREADS "
        "POST_INPUT_THREADS GLOG_stderrthreshold OMP_NUM_THREADS LOCAL_RANK num_embeddings embedding_dim data_type feature_names pooling "
        "weight_init_min weight_init_max weight_init_mean weight_init_stddev initializer_type init_fn admit_and_evict_config is_incremental "
        "need_pos num_embeddings_post_pruning input_dim total_num_buckets use_virtual_table virtual_table_eviction_policy "
        "enable_embedding_update optim_num cache_size num_features initializer_random_pool_size seed admit_threshold "
        "not_admitted_default_value evict_threshold evict_step_interval policy_type alpha beta evict_percentage score_decay world_size "
        "batch_size multi_hot_sizes is_weighted need_indices need_accumulate_offset embedding_optimizer_cls AccumulateAdagrad AccumulateAdam "
        "AccumulateSGD use_accumulate accumulate_step EmbCacheEmbeddingBagCollectionSharder EmbCacheEmbeddingCollectionSharder cpu_device "
        "cpu_env npu_device npu_env fused_params qcomm_codecs_registry KeyedJaggedTensorWithTimestamp JaggedTensorWithTimestamp "
        "KeyedJaggedTensorWithCount KeyedJaggedTensorWithLookHelper click_labels return_loss execute_all_batches apply_jit context_type "
        "pipeline_postproc custom_model_fwd custom_model_zero_grad custom_model_bwd progress wait_pipeline_compute_swapinfo attach Saver "
        "incremental get_latest_load_path table_indices model_convert compute_swap_info_async embedding_lookup_async "
        "embedding_update_async statistics_key_count record_timestamp record_batch_keys_async evict_features embedding_to_host"
    ).split():
        assert re.search(rf"\b{name}\b", GUIDE), name


def test_every_public_name_is_documented() -> None:
    for name in face.__all__:
        assert getattr(face, name).__doc__, name


@pytest.mark.parametrize("module", ["configs", "jagged", "modules", "optimizers", "pipeline", "replace"])
def test_the_examples_in_docstrings_run(module: str) -> None:
    import doctest
    from importlib import import_module

    result = doctest.testmod(import_module(f"embcache.torchrec.{module}"))
    assert result.attempted > 0 and result.failed == 0
