"""Where the model lives (`placing`), where the user's code puts tensors (`tracking`), and what says so in a graph (`markers`)."""
