//! NVML's measurements of GPUs, in metrics by Triton's names.

use downbeat_engine_ort::cuda::nvml::NvmlSample;

use crate::metric_table;

metric_table! {
    /// NVML's measurements of GPUs, by Triton's names. A clone shares its metrics.
    #[derive(Clone)]
    pub struct GpuMetrics {
        utilization: GaugeVec["gpu_uuid"], "nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0]";
        power: GaugeVec["gpu_uuid"], "nv_gpu_power_usage", "GPU power usage in watts";
        power_limit: GaugeVec["gpu_uuid"], "nv_gpu_power_limit", "GPU power management limit in watts";
        energy: CounterVec["gpu_uuid"], "nv_energy_consumption", "GPU energy consumption in joules since the server started";
        memory: GaugeVec["gpu_uuid"], "nv_gpu_memory_total_bytes", "GPU total memory, in bytes";
        memory_used: GaugeVec["gpu_uuid"], "nv_gpu_memory_used_bytes", "GPU used memory, in bytes";
        xids: IntCounterVec["gpu_uuid", "xid"], "downbeat_gpu_xids_total", "Errors of the GPU that its driver reported, by NVIDIA's number";
    }
}

impl GpuMetrics {
    /// Sets the measurements of a GPU, and adds the energy that it has used since the last time,
    /// joules.
    pub fn set(&self, gpu: &str, sample: &NvmlSample, energy: f64) {
        let Self { utilization, power, power_limit, memory, memory_used, .. } = self;
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        for (gauge, value) in [
            (utilization, sample.utilization),
            (power, sample.power),
            (power_limit, sample.power_limit),
            (memory, bytes(sample.memory)),
            (memory_used, bytes(sample.memory_used)),
        ] {
            match value {
                Some(value) => gauge.with_label_values(&[gpu]).set(value),
                // An error means that there was none.
                None => drop(gauge.remove_label_values(&[gpu])),
            }
        }
        if sample.energy.is_some() {
            self.energy.with_label_values(&[gpu]).inc_by(energy.max(0.0));
        }
    }

    /// Forgets the gauges of a GPU that cannot be measured any more.
    pub fn forget(&self, gpu: &str) {
        self.set(gpu, &NvmlSample::default(), 0.0);
    }

    /// Counts an error that the driver reported of a GPU.
    pub fn count_xid(&self, gpu: &str, xid: u64) {
        self.xids.with_label_values(&[gpu, xid.to_string().as_str()]).inc();
    }
}
