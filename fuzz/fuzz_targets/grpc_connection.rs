//! libFuzzer on [`downbeat_fuzz::grpc_connection`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::grpc_connection(data));
