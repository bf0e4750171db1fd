"""Running bundles on a GPU with the CUDA driver alone.  The rest of cgbundle imports nothing from here until a bundle needs it."""
