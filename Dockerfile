# The image holds the dependencies. The repository is mounted, not copied, so the code can change
# without a new image.
#
#   docker build --tag lattice .                       where there is Docker
#   enroot import --output lattice.sqsh dockerd://lattice        for pyxis (srun --container-image)
#   apptainer build lattice.sif docker-daemon://lattice:latest   for Apptainer
#
#   sbatch --export ALL,CONTAINER_IMAGE=$PWD/lattice.sqsh slurm/train_70b.sh
#
# The driver is the machine's; CUDA, cuDNN and NCCL come with torch.
FROM python:3.12-slim-bookworm

# gcc: Triton compiles a small C program for each kernel that it launches. The ibverbs packages let
# NCCL use InfiniBand and RoCE; without them it falls back to TCP, which it reports only with
# NCCL_DEBUG=INFO.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*

COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --requirement /tmp/requirements.txt

WORKDIR /lattice
