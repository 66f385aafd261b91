"""Rung: pure. Which bars a run's rows meet, miss, or do not speak of."""

from __future__ import annotations

from benchmarks.gpu.tables.bars import verdicts


def test_bars_are_met_short_or_not_measured() -> None:
    assert {verdict.state for verdict in verdicts([])} == {"not measured"}
    ratio = "tpkernels_speedup_over_torch_median_ratio"
    product = {"case": "kernels/matmul_qkv/x", "op": "matmul", "model": "llama3_8b", "dtype": "bfloat16", "seq": 4096}
    sdpa = {"contestants": ["tpkernels", "torch", "sdpa_flash", "sdpa_cudnn"], "torch_median_seconds": 0.1}
    sdpa |= {"sdpa_flash_median_seconds": 4.0, "sdpa_cudnn_median_seconds": 2.0, "tpkernels_median_seconds": 3.0}
    attention = {"case": "kernels/attention/x", "direction": "forward", "seq": 4096, "model": "llama3_8b", **sdpa}
    step = {"case": "train/llama_1b/against_torch", "gpu": "NVIDIA H100 80GB HBM3", "mfu_attention_half_percent": 53.0}
    step |= {"ours_over_torch_median_ratio": 0.96, "ours_over_torch_float32_median_ratio": 0.89}
    rows = [
        product | {ratio: 1.1},
        product | {ratio: 1.05},
        product | {ratio: 0.8},
        product | {ratio: 0.1, "check": "failed: wrong"},
        product | {ratio: 0.1, "seq": 512},
        product | {ratio: 0.1, "num_samples": 1},
        product | {ratio: 0.1, "case": "kernels/matmul_swiglu/x"},
        attention,
        {"case": "host/fused/gather", "host_us": 30.0, "by_engine": False},
        {"case": "host/fused/gather/engine", "host_us": 70.0, "by_engine": True},
        step,
        step | {"ours_over_torch_median_ratio": 0.5, "num_samples": 1},
        *[
            {"case": f"blind/{n}", "predicted_over_measured_ratio": ratio, "num_layouts": 2, "num_samples": 4}
            for n, ratio in enumerate((1.04, 0.88))
        ],
        {"case": "architectures/gpt2/float32", "kl_over_limit_ratio": 0.01},
        {"case": "architectures/gpt2/bfloat16", "error_over_transformers_ratio": 1.1},
        {"case": "architectures/qwen3/bfloat16", "error_over_transformers_ratio": 1.6, "check": "failed: 1.6 times"},
    ]
    found = {verdict.bar: (verdict.state, verdict.found.partition(" ")[0]) for verdict in verdicts(rows)}
    assert list(found.values()) == [
        ("met", "1.05"),
        ("short", "0.8"),
        ("short", "0.667"),
        ("not measured", ""),
        ("met", "30"),
        ("short", "70"),
        ("short", "0.96"),
        ("met", "0.89"),
        ("not measured", ""),
        ("short", "53"),
        ("short", "0.12"),
        ("met", "0.01"),
        ("short", "1.6"),
    ]


def test_a_layout_that_was_not_measured_leaves_the_bar_short() -> None:
    rows = [{"case": f"blind/{n}", "predicted_over_measured_ratio": 1.0, "num_layouts": 3} for n in range(3)]
    for found, state in ((rows, "met"), (rows[:2], "short"), ([], "not measured")):
        (verdict,) = [verdict for verdict in verdicts(found) if "predicted" in verdict.bar]
        assert verdict.state == state
