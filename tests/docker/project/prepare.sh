# A policy of random weights.
set -eu
if [ ! -f runs/policy/model.safetensors ]; then
    outloop new-policy --out runs/policy
fi
