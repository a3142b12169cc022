# docker build -t gpubound . && docker run --gpus all gpubound            prints what the GPU can do
# docker run --gpus all gpubound gpubound doctor examples/slow_loop.py
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime
FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends git make gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /gpubound
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -e '.[hf]' pytest pytest-xdist hypothesis
CMD ["gpubound", "env"]
