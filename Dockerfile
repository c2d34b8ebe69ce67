# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# An image for NVIDIA GPUs: docker build -t phalanx . && docker run --gpus all --ipc host -p 8000:8000 phalanx demo

# The wheel, from the sources.
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# CUDA's compiler is for FlashInfer, which compiles kernels at the first start; gcc is for Triton. The CUDA libraries come with torch.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/phalanx
ENV PATH=/opt/phalanx/bin:$PATH
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/phalanx-*.whl)[gpu]" && rm -rf /wheels

# Checkpoints and compiled kernels: mount a volume here, and the next container finds them.
RUN useradd --create-home --uid 10001 phalanx && mkdir /cache && chown phalanx /cache
VOLUME /cache
ENV HF_HOME=/cache/huggingface PHALANX_KERNEL_CACHE_DIR=/cache/kernels PHALANX_HOST=0.0.0.0
USER phalanx
WORKDIR /home/phalanx
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/ready', timeout=5)"]
ENTRYPOINT ["phalanx", "serve"]
