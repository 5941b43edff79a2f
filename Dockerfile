# Kedge with vLLM, Ray and PEFT, for NVIDIA GPUs.  From a checkout:
#   docker build -t kedge .
#   docker run --gpus all --ipc host -v "$PWD/runs:/work/runs" kedge ppo --help
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap git \
    && rm -rf /var/lib/apt/lists/*

# Dependencies first, so that a change of the sources does not install them again.
COPY pyproject.toml README.md LICENSE /kedge/
COPY src/kedge/__init__.py /kedge/src/kedge/
ENV SETUPTOOLS_SCM_PRETEND_VERSION=0.1.0
RUN pip install --no-cache-dir "/kedge[peft,vllm,ray,sft,plots,tensorboard,math]"
COPY . /kedge
RUN pip install --no-cache-dir --no-deps /kedge

WORKDIR /work
ENTRYPOINT ["kedge"]
CMD ["--help"]
