"""Whether a call may be padded or cut, proved operator by operator."""
