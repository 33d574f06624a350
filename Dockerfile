# Two targets: `cpu` and `gpu`. How to build and run them: docs/deploy.md.
#
# The GPU image needs no CUDA base: torch's wheels bring the CUDA libraries, Triton brings its
# assembler, and the host's container toolkit brings the driver.

FROM debian:bookworm-slim AS python
ENV PATH=/opt/flashwire/bin:$PATH
# Versions are Debian's: pinned ones would stop the build at the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/*

FROM python AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/flashwire
WORKDIR /src
# Dependencies first, against empty packages: this layer stays until pyproject or constraints change.
COPY pyproject.toml constraints.txt ./
RUN mkdir -p client/flashwire kernels/flashwire_kernels service/flashwire_service \
 && touch README.md LICENSE \
 && grep '^torch==' constraints.txt > torch.txt

FROM build AS build-cpu
# Where pip finds torch without CUDA; empty takes the standard build, larger by gigabytes.
ARG TORCH_INDEX_URL=""
RUN pip install --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r torch.txt \
 && pip install -c constraints.txt ".[service,otel]"
COPY . .
RUN pip install --no-deps --force-reinstall .

FROM build AS build-gpu
RUN pip install -c constraints.txt -r torch.txt ".[gpu,otel]"
COPY . .
RUN pip install --no-deps --force-reinstall .

FROM python AS runtime
RUN useradd --create-home --uid 10001 flashwire \
 && install -d -o flashwire -g flashwire /var/cache/flashwire
WORKDIR /home/flashwire
# Beyond loopback the service starts only with FLASHWIRE_API_KEYS (or FLASHWIRE_ALLOW_OPEN): give one.
ENV FLASHWIRE_HOST=0.0.0.0 \
    FLASHWIRE_PORT=8000 \
    PYTHONUNBUFFERED=1
EXPOSE 8000
# A first start loads torch and computes real attentions before it is ready; on a GPU it compiles the
# kernels of FLASHWIRE_WARMUP, too, which takes minutes where the cache is empty.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=3 \
    CMD ["python", "-m", "flashwire_service.health"]
ENTRYPOINT ["flashwire-serve"]
USER 10001:10001

FROM runtime AS cpu
COPY --from=build-cpu /opt/flashwire /opt/flashwire
ENV FLASHWIRE_DEVICE=cpu

FROM runtime AS gpu
# Triton compiles small launchers at run time: a C compiler and Python's headers.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=build-gpu /opt/flashwire /opt/flashwire
# cuda, not auto: a container without its GPU must fail, not compute slowly.
ENV FLASHWIRE_DEVICE=cuda \
    FLASHWIRE_TRITON_CACHE_DIR=/var/cache/flashwire/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Compiled kernels. The user may write there, also where no volume is given.
VOLUME /var/cache/flashwire
