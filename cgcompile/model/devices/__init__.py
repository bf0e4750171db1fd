"""Where the model lives (`placing`), where the user's code puts tensors (`tracking`, by `tensor_places`, `operations`, `moves` and
`data_reads`), and what says so in a graph (`markers`)."""
