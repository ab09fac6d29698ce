python -m trainer processes=2 --config-dir lab/conf experiment=turns strategy=fsdp
