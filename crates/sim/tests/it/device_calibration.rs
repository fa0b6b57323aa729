//! The emulated device against published latencies: one test for each row of each table, within 5%.

use downbeat_sim::device::{Architecture, EmulatedModel, Operator, Platform};

fn within(found: f64, expected: f64, what: &str) {
    let off = found / expected - 1.0;
    assert!(off.abs() <= 0.05, "{what}: {found:.2} ms, published {expected} ms, {:+.1}%", off * 100.0);
}

fn row(platform: Platform, architecture: Architecture, published: &[(u32, f64)]) {
    let model = EmulatedModel::new(architecture, platform);
    for (batch, latency) in published {
        let found = model.time(*batch, 0).as_millis_f64();
        within(found, *latency, &format!("{architecture}, batch {batch}"));
    }
}

#[test]
fn e2bird_section_1_table_1_resnet50() {
    row(Platform::TITAN_CUDNN, Architecture::ResNet50, &[(4, 6.8), (8, 12.1), (16, 21.5), (32, 40.1)]);
}

#[test]
fn e2bird_section_1_table_1_resnet101() {
    row(Platform::TITAN_CUDNN, Architecture::ResNet101, &[(4, 11.8), (8, 20.6), (16, 36.2), (32, 65.4)]);
}

#[test]
fn e2bird_section_1_table_1_resnet152() {
    row(Platform::TITAN_CUDNN, Architecture::ResNet152, &[(4, 17.3), (8, 29.2), (16, 49.5), (32, 93.7)]);
}

#[test]
fn gslice_section_4_4_table_5_resnet50() {
    row(Platform::V100_TENSORRT, Architecture::ResNet50, &[(8, 9.75), (16, 14.5), (32, 25.9)]);
}

#[test]
fn gslice_section_4_4_table_5_vgg19() {
    row(Platform::V100_TENSORRT, Architecture::Vgg19, &[(8, 30.54), (16, 40.95), (32, 63.12)]);
}

/// What a product takes without its issue, in milliseconds.
fn product(rows: u64, columns: u64, batch: u32) -> f64 {
    let operator = Operator { weights: 0, ..Operator::matrix("product", rows, 576, columns) };
    Platform::TITAN_TENSORRT.kernel(&operator, batch).run.as_millis_f64()
}

/// `[bs*3136,576] x [576,64]`: 115.6 million multiplications an item at 75.2% of 8.15 * 10^12 a second.
#[test]
fn dvabatch_section_3_2_figure_5_gemm_a_prefers_a_batch_of_1() {
    for batch in [1, 2, 4, 8, 16, 32, 64] {
        within(product(3136, 64, batch), f64::from(batch) * 0.01886, &format!("GEMM-A, batch {batch}"));
    }
}

/// `[bs*49,576] x [576,512]`: as GEMM-A's item until 8 items fill the device, then 14.45 million multiplications an item.
#[test]
fn dvabatch_section_3_2_figure_5_gemm_b_prefers_a_batch_of_8() {
    for batch in [1, 2, 4, 8] {
        within(product(49, 512, batch), 0.01886, &format!("GEMM-B, batch {batch}"));
    }
    for batch in [9, 16, 32, 64] {
        within(product(49, 512, batch), f64::from(batch) / 8.0 * 0.01886, &format!("GEMM-B, batch {batch}"));
    }
}

/// Published counts, in 10^9: the lists of operators are the networks they claim to be.
#[test]
fn networks_multiply_as_often_as_published() {
    let published = [
        (Architecture::ResNet50, 4.1, 25.5),
        (Architecture::ResNet101, 7.8, 44.4),
        (Architecture::ResNet152, 11.5, 60.0),
        (Architecture::Vgg16, 15.5, 138.3),
        (Architecture::Vgg19, 19.6, 143.6),
        (Architecture::InceptionV4, 12.3, 42.6),
    ];
    for (architecture, giga, mega) in published {
        let operators = architecture.operators(true, 0);
        let sum = |of: fn(&Operator) -> u64| operators.iter().map(of).sum::<u64>() as f64;
        let (multiplications, weights) = (sum(|o| o.multiplications) / 1e9, sum(|o| o.weights) / 1e6);
        assert!((multiplications / giga - 1.0).abs() < 0.1, "{architecture}: {multiplications:.2} of {giga}");
        assert!((weights / mega - 1.0).abs() < 0.05, "{architecture}: {weights:.1} of {mega}");
    }
    let bert = |architecture: Architecture| {
        architecture.operators(true, 128).iter().map(|operator| operator.weights).sum::<u64>() as f64 / 1e6
    };
    assert!((bert(Architecture::BertBase) / 85.1 - 1.0).abs() < 0.02, "without the table of words");
    assert!((bert(Architecture::BertLarge) / 302.0 - 1.0).abs() < 0.02, "without the table of words");
}
