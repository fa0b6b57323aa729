//! Says which libraries the tests find on this machine.

include!("libraries.rs");

fn main() {
    println!("cargo:rerun-if-changed=libraries.rs");
    find_libraries(&["onnxruntime"]);
}
