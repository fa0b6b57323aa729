//! Random workloads of the kind that appendix A.2 partitions: variants of a zoo's models with
//! exponential rates.

use downbeat_plan::Workload;
use downbeat_plan::workload::{Entry, Profile};
use rand::RngExt;
use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;

/// Models of the zoo: name, `alpha` and `beta` in milliseconds and SLO in milliseconds on an A100
/// (Symphony, table 4), and millions of parameters as their authors give them.
const ZOO: [(&str, f64, f64, f64, f64); 37] = [
    ("DenseNet121", 0.054, 10.546, 21.0, 8.1),
    ("DenseNet201", 0.304, 14.345, 31.0, 20.2),
    ("DenseNet169", 0.289, 13.365, 29.0, 14.3),
    ("ResNet50V2", 0.135, 5.56, 20.0, 25.6),
    ("EfficientNetB0", 0.115, 4.326, 20.0, 5.3),
    ("ResNet101", 0.284, 8.266, 20.0, 44.7),
    ("ResNet152", 0.39, 10.449, 24.0, 60.4),
    ("ResNet101V2", 0.391, 8.219, 20.0, 44.7),
    ("MobileNetV3Large", 0.196, 4.072, 20.0, 5.4),
    ("EfficientNetB1", 0.291, 5.797, 20.0, 7.9),
    ("ResNet50", 0.268, 5.172, 20.0, 25.6),
    ("ResNet152V2", 0.589, 10.054, 24.0, 60.4),
    ("MobileNetV2", 0.19, 2.892, 20.0, 3.5),
    ("EfficientNetV2B3", 0.543, 7.596, 20.0, 14.5),
    ("InceptionResNetV2", 1.112, 15.27, 39.0, 55.9),
    ("EfficientNetV2B1", 0.443, 5.929, 20.0, 8.2),
    ("NASNetMobile", 0.536, 6.86, 20.0, 5.3),
    ("EfficientNetV2B0", 0.377, 4.272, 20.0, 7.2),
    ("EfficientNetB2", 0.52, 5.333, 20.0, 9.2),
    ("MobileNetV3Small", 0.315, 3.211, 20.0, 2.5),
    ("InceptionV3", 0.913, 6.732, 20.0, 23.9),
    ("MobileNet", 0.285, 1.901, 20.0, 4.3),
    ("EfficientNetV2S", 1.454, 7.378, 26.0, 21.6),
    ("EfficientNetV2B2", 0.901, 4.532, 20.0, 10.2),
    ("VGG16", 0.66, 2.252, 20.0, 138.4),
    ("EfficientNetB3", 1.239, 4.205, 20.0, 12.3),
    ("Xception", 0.801, 2.638, 20.0, 22.9),
    ("VGG19", 0.893, 2.181, 20.0, 143.7),
    ("NASNetLarge", 3.464, 7.154, 42.0, 88.9),
    ("EfficientNetV2M", 4.479, 6.861, 49.0, 54.4),
    ("EfficientNetB4", 2.881, 4.103, 31.0, 19.5),
    ("EfficientNetV2L", 7.52, 6.675, 73.0, 119.0),
    ("EfficientNetB5", 6.121, 2.283, 53.0, 30.6),
    ("SSDMobilenet", 19.448, 4.442, 164.0, 6.8),
    ("EfficientNetB6", 9.754, 1.984, 82.0, 43.3),
    ("EfficientNetB7", 16.339, 2.751, 136.0, 66.7),
    ("BERT", 7.353, 0.222, 59.0, 110.0),
];

/// Mean request rate of a model, per second.
const MEAN_RATE: f64 = 20.0;
/// Memory of a device: an A100 of the smaller kind has this much beside the engine's own memory.
const DEVICE_MEMORY: u64 = 8 << 30;

/// Generates `models` models on `sub_clusters` sub-clusters. The same numbers give the same
/// workload.
///
/// Each model is a random variant of a model of the zoo. Its weights take 4 bytes a parameter and
/// up to a tenth more (another head). Its request rate is exponential, its dynamic memory between
/// 0.25 and 1 GiB. A sub-cluster takes half as much again as the average rate. Devices have 8 GiB
/// or, where models are many, half as much again as the average static memory.
pub fn generate(models: usize, sub_clusters: usize, seed: u64) -> Workload {
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut entries = Vec::with_capacity(models);
    for index in 0..models {
        let (name, alpha_ms, beta_ms, slo_ms, millions) = ZOO[rng.random_range(0..ZOO.len())];
        let parameters = millions * 1e6 * rng.random_range(1.0..1.1);
        // The mean is positive, so the distribution exists.
        let rate = Exp::new(1.0 / MEAN_RATE).map_or(MEAN_RATE, |exp| exp.sample(&mut rng));
        entries.push(Entry {
            name: format!("{name}-{index:03}"),
            // Two digits, as a person would write the rate; at least 0.01.
            rate: (rate * 100.0).round().max(1.0) / 100.0,
            // Whole KiB and MiB, as in a file.
            memory: ((4.0 * parameters) as u64) >> 10 << 10,
            dynamic_memory: rng.random_range(256..=1024_u64) << 20,
            load_cost: 1.0,
            slo_ms,
            profile: Profile::Linear { alpha_ms, beta_ms, max_batch: None },
            running_on: None,
        });
    }
    let clusters = sub_clusters.max(1) as f64;
    let rate: f64 = entries.iter().map(|e| e.rate).sum();
    let memory: u64 = entries.iter().map(|e| e.memory).sum();
    Workload {
        sub_clusters,
        devices: None,
        device_memory: Some(DEVICE_MEMORY.max((1.5 * memory as f64 / clusters) as u64 >> 20 << 20)),
        max_rate: Some((1.5 * rate / clusters).ceil()),
        memory_weight: 1.0,
        max_disruption: None,
        models: entries,
    }
}
