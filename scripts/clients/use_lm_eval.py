# SPDX-License-Identifier: Apache-2.0
"""lm-eval: a task of texts over chats, and one of log-likelihoods over completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL, TOKENIZER = os.environ["BASE_URL"], os.environ["MODEL"], os.environ["TOKENIZER"]
ROWS = [{"q": "The capital of Norway is", "a": "Oslo"}, {"q": "The capital of Italy is", "a": "Rome"}]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
"""
TEXTS = """
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOICES = """
doc_to_target: 0
doc_to_choice: ["Oslo", "Rome"]
metric_list: [{metric: acc}]
"""

data = Path("rows.jsonl").resolve()
data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
Path("texts.yaml").write_text(TASK.format(name="texts", data=data, kind="generate_until") + TEXTS)
Path("choices.yaml").write_text(TASK.format(name="choices", data=data, kind="multiple_choice") + CHOICES)
program = Path(sys.executable).parent / "lm_eval"
for model, path, task, more in (
    ("local-chat-completions", "chat/completions", "texts", ["--apply_chat_template"]),
    ("local-completions", "completions", "choices", []),
):
    arguments = f"model={MODEL},base_url={URL}/{path},num_concurrent=1,max_retries=1"
    if task == "choices":
        arguments += f",tokenizer_backend=huggingface,tokenizer={TOKENIZER}"
    command = [program, "--model", model, "--model_args", arguments, "--include_path", ".", "--tasks", task, *more]
    subprocess.run(command, check=True, timeout=300)
