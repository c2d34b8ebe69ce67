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
    && apt-get install -y --no-install-recommends gcc ninja-build python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/phalanx
ENV PATH=/opt/phalanx/bin:$PATH
COPY --from=wheel /wheels /wheels
# With --build-arg EXTRAS=gpu,ray the image also runs in a Ray cluster; KubeRay's probes of it call wget.
ARG EXTRAS=gpu
# The versions that the figures in README were measured with.
COPY constraints.txt ./constraints.txt
RUN pip install --no-cache-dir -c constraints.txt "$(ls /wheels/phalanx-*.whl)[$EXTRAS]" && rm -rf /wheels

# Checkpoints and compiled kernels: mount a volume here, and the next container finds them. It belongs to the user "nobody", who runs
# the server, here as in the manifests of `phalanx deploy`. With /cache and /tmp as mounts, the root may be read-only.
RUN mkdir /cache && chown 65534:65534 /cache
VOLUME /cache
ENV HOME=/tmp HF_HOME=/cache/huggingface PHALANX_KERNEL_CACHE_DIR=/cache/kernels PHALANX_HOST=::
USER 65534:65534
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python3", "-m", "phalanx.health.ready"]
ENTRYPOINT ["phalanx", "serve"]
