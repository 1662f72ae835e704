"""A seeded mutational fuzzer of the codec, guided by the lines it reaches."""
