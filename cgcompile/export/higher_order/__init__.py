"""Higher-order operators that are no more than their operations, taken out of an exported program (`expand`)."""
