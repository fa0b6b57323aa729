//! Says which libraries the tests find on this machine.

include!("../../tests/libraries.rs");

fn main() {
    println!("cargo:rerun-if-changed=../../tests/libraries.rs");
    find_libraries(&["onnxruntime"]);
}
