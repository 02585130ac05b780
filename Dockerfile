# What a container needs beside the repository, which is mounted into it and not copied: code and
# image change apart.
#
#   docker build --tag lattice .                       where there is Docker
#   enroot import --output lattice.sqsh dockerd://lattice        for pyxis (srun --container-image)
#   apptainer build lattice.sif docker-daemon://lattice:latest   for Apptainer
#
#   sbatch --export ALL,CONTAINER_IMAGE=$PWD/lattice.sqsh slurm/train_70b.sh
#
# The driver comes from the machine; CUDA, cuDNN and NCCL come with torch.
FROM python:3.12-slim-bookworm

# gcc: Triton compiles a small C program for each kernel it launches. The other two let NCCL use
# InfiniBand and RoCE; without them it falls back to TCP, and says so only with NCCL_DEBUG=INFO.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*

COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --requirement /tmp/requirements.txt

WORKDIR /lattice
