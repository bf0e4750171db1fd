"""Whether a call may be padded or chunked, proved operator by operator."""
