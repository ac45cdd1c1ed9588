"""What a step costs on several ranks, beside plain DDP, FSDP2 and Lightning."""
