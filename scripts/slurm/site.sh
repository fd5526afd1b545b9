# shellcheck shell=bash disable=SC2034 # what is set here is used elsewhere
# What differs between clusters, sourced by every job before anything else: change it here, once.
# What sbatch itself needs (partition, account) it takes from the environment in which it is called: SBATCH_PARTITION, SBATCH_ACCOUNT, ….

# The environment: the repository's own, else the one in which sbatch was called, or the container's.
# module load cuda/13.0
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi

# Compute nodes without internet: fetch everything beforehand with tools/download.py, into a folder that all nodes see.
# export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

# The network between nodes.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# More words for srun, such as those that name a container.
srun_options=()
