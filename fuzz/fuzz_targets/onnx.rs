//! libFuzzer on [`downbeat_fuzz::onnx`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::onnx(data));
