# An image with fasttrain, its CUDA torch and all that compiling kernels needs (a C compiler; Python's headers come with the base).
#
#   docker build -t fasttrain .
#   docker run --rm --gpus all --shm-size=8g fasttrain fasttrain doctor
#   docker run --gpus all --shm-size=8g --stop-timeout 60 -v /data/volume:/workspace fasttrain \
#     /opt/fasttrain/scripts/keep_training.sh --run /workspace/runs/first --recipe hippocampus
#
# --gpus all          gives the container the cards; it needs the NVIDIA container toolkit on the host. Without it fasttrain trains on
#                     the CPU, and `fasttrain doctor` says why
# --shm-size=8g       loader workers hand their batches over in shared memory, of which Docker gives 64 MB. With less than they need
#                     fasttrain makes fewer batches ahead, and says so
# --stop-timeout 60   what `docker stop` waits for the checkpoint before it kills; Docker's own 10 s are too short for a large one
# -v …:/workspace     runs, data and caches outlive the container only on a volume
#
# On RunPod, give the image's name as the template's image and one of the commands above, from /opt/fasttrain on, as its start command.
FROM python:3.12-slim-bookworm

RUN apt-get update \
  && apt-get install --yes --no-install-recommends gcc libc6-dev git openssh-client procps \
  && rm -rf /var/lib/apt/lists/*

# What NVIDIA's own base images set: the toolkit hands the driver over to containers that ask for it
ENV NVIDIA_VISIBLE_DEVICES=all \
  NVIDIA_DRIVER_CAPABILITIES=compute,utility \
  PIP_NO_CACHE_DIR=1 \
  PYTHONUNBUFFERED=1 \
  FASTTRAIN_DATA=/workspace/data \
  FASTTRAIN_CACHE=/workspace/cache

# The tested versions first, in a layer of its own that a change of the code leaves as it is
WORKDIR /opt/fasttrain
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" >/tmp/needed.txt \
  && pip install --constraint constraints.txt --requirement /tmp/needed.txt \
  && rm /tmp/needed.txt
COPY fasttrain ./fasttrain
COPY recipes ./recipes
COPY scripts ./scripts
RUN pip install --no-deps --editable .

WORKDIR /workspace
CMD ["fasttrain", "--help"]
