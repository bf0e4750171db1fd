"""Sessions of a cuda bundle on a GPU.  The rest of cgbundle imports nothing from here until a bundle needs it."""
