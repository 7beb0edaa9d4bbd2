# What the compose stack runs before `outloop init`: a policy that knows the format of a tool call.
set -eu
here=$(dirname "$0")
if [ ! -f runs/calculator-warm-start/hf/model.safetensors ]; then
    outloop new-policy --out runs/calculator-policy --conversations tasks:conversations --import-dir "$here"
    outloop train "$here/warm_start.toml"
fi
