# SPDX-License-Identifier: Apache-2.0
"""inference-perf: a load of streamed completions with synthetic prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFIG = """
load: {{type: constant, stages: [{{rate: 2, duration: 3}}], num_workers: 1}}
api: {{type: completion, streaming: true}}
server: {{type: vllm, model_name: {model}, base_url: {url}, ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}
data: {{type: random, input_distribution: {{min: 10, max: 20, mean: 15, std_dev: 2, total_count: 10}},
        output_distribution: {{min: 4, max: 8, mean: 6, std_dev: 1, total_count: 10}}}}
report: {{request_lifecycle: {{summary: true}}}}
"""

url = os.environ["BASE_URL"].removesuffix("/v1")
Path("config.yml").write_text(CONFIG.format(model=os.environ["MODEL"], url=url, tokenizer=os.environ["TOKENIZER"]))
program = Path(sys.executable).parent / "inference-perf"
subprocess.run([program, "--config_file", "config.yml"], check=True, timeout=300)
