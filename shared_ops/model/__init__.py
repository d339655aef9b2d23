"""One dense decoder for Llama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3, by flags."""
