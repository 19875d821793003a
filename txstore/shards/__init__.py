"""Layout of tensors in shard files: plain safetensors, streamed out, read by range. No torch, no DCP."""
