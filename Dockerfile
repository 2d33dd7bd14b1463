# r18 on an NVIDIA GPU. docs/ci.md says how to build and run it.
#
# No CUDA image underneath: the host gives the driver (NVIDIA Container Toolkit), and pip the rest.
# NVRTC and the runtime's headers come with PyTorch, so PyTorch's CUDA version and the extra agree.

FROM python:3.12-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim
ARG EXTRAS=oracle,numba,cuda13
# Numba threads its kernels by OpenMP; without libgomp it takes a layer that two threads cannot use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/r18-*.whl)[${EXTRAS}]" && rm -r /wheel
# Compiled code is only loaded from a folder that nobody else can write to.
RUN useradd --create-home r18 && install --directory --owner r18 --mode 700 /home/r18/.cache
USER r18
WORKDIR /home/r18
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["r18"]
CMD ["demo"]
