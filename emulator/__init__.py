"""pd-emulator: a laboratory for prefill/decode disaggregation of LLM inference."""

__version__ = "0.1.0"
