"""What SGLang 0.5.23 needs to run without a GPU; this folder is put on its PYTHONPATH.

Nothing here computes anything, and SGLang stays as its authors ship it.

* `sitecustomize.py` declares two operators of torchvision before its first import, because the
  published torchvision is linked against CUDA and cannot load its own. It can go when a CPU build
  of torchvision is on the package index. It also reports that there are no AMX tiles, since the
  kernels which would use them are those that `sgl_kernel` stands for. And it enters, in SGLang's
  table of allocators, one for the host memory of reported experts, which SGLang registers with CUDA
  on every device that the table lacks.
* `sgl_kernel/` stands for SGLang's CPU kernels, two of which are imported by name and none called.
  It can go when `sglang-kernel-cpu` is on the package index.
"""
