"""Lightning callbacks: monitoring, learning-rate scaling, layouts that change between epochs."""
