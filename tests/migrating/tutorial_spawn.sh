python -m trainer processes=2 --config-dir lab/conf model=net \
    data=fashion_mnist data.root=data/FashionMNIST/raw data.augment.crop=0 data.augment.flip=false \
    optimizer=sgd optimizer.lr=0.05 optimizer.nesterov=false optimizer.weight_decay=0 \
    schedule=torch schedule._target_=torch.optim.lr_scheduler.StepLR +schedule.step_size=1 +schedule.gamma=0.5 \
    loop.global_batch=32 loop.max_norm=1 loop.epochs=2
