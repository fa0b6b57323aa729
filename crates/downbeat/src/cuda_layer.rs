//! `[cuda]` of `downbeat.toml`, and the flags for it.

use anyhow::bail;
use downbeat_core::Duration;
use downbeat_server::options::{CudaMissing, CudaOptions};

use crate::layer::{named, seconds};

/// What one source says about GPUs.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaLayer {
    /// Ordinals; empty: all.
    pub gpus: Option<Vec<u32>>,
    #[serde(default, deserialize_with = "named")]
    pub missing: Option<CudaMissing>,
    /// MiB.
    pub memory_limit_mb: Option<u64>,
    pub tf32: Option<bool>,
    pub graphs: Option<bool>,
    /// Zero: GPUs are not measured for metrics.
    #[serde(default, rename = "metrics_every_s", deserialize_with = "seconds")]
    pub metrics_every: Option<Duration>,
    pub nhwc: Option<bool>,
}

impl CudaLayer {
    /// What is given here, over what `options` already says.
    ///
    /// # Errors
    /// If a value is out of range.
    pub fn apply(&self, options: &mut CudaOptions) -> anyhow::Result<()> {
        let CudaLayer { gpus, missing, memory_limit_mb, tf32, graphs, nhwc, metrics_every: _ } = self;
        if let Some(gpus) = gpus {
            options.devices.clone_from(gpus);
        }
        options.missing = missing.unwrap_or(options.missing);
        options.tf32 = tf32.unwrap_or(options.tf32);
        options.graphs = graphs.unwrap_or(options.graphs);
        options.nhwc = nhwc.unwrap_or(options.nhwc);
        if let Some(limit) = memory_limit_mb {
            match limit.checked_mul(1 << 20) {
                Some(bytes) if bytes > 0 => options.memory_limit = Some(bytes),
                _ => bail!("[cuda] memory_limit_mb is {limit}; must be at least 1, or left out for no limit"),
            }
        }
        Ok(())
    }
}
