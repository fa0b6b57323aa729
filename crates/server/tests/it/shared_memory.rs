//! The registered regions, and the tensors in a region.

use downbeat_core::tensor::DataType;
use downbeat_frontend::extension::{apply_outputs, resolve_inputs};
use downbeat_frontend::shared_memory::{MAX_REGIONS, RegionStatus, SharedMemory};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;

use crate::support::shared_object::SharedObject;

/// The client in this process.
const ME: Client = Client::HERE;

fn assert_invalid(result: Result<impl std::fmt::Debug, ServiceError>, expected: &str) {
    match result {
        Err(ServiceError::InvalidArgument(message)) => assert!(message.contains(expected), "{message} / {expected}"),
        other => panic!("{other:?}, expected InvalidArgument with {expected}"),
    }
}

#[test]
fn a_region_is_read_and_written_where_it_is_in_the_object() {
    let object = SharedObject::new("place", 64);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 16, 32).unwrap();
    object.write(16, &[1, 2, 3, 4]);
    assert_eq!(&memory.read(ME, "r", 0, 4).unwrap()[..], [1, 2, 3, 4]);
    memory.write(ME, "r", 2, &[9, 8]).unwrap();
    assert_eq!(object.read(16, 4), [1, 2, 9, 8]);
    assert_eq!(memory.read(ME, "r", 32, 0).unwrap().len(), 0);
    memory.write(ME, "r", 28, &[5; 4]).unwrap();
    assert_eq!(object.read(44, 5), [5, 5, 5, 5, 0]);
}

#[test]
fn what_was_read_does_not_change_with_the_object() {
    let object = SharedObject::new("copy", 8);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 0, 8).unwrap();
    let read = memory.read(ME, "r", 0, 8).unwrap();
    object.write(0, &[7; 8]);
    assert_eq!(&read[..], [0; 8]);
}

#[test]
fn ranges_outside_a_region_are_refused() {
    let object = SharedObject::new("range", 64);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 0, 32).unwrap();
    for (offset, size) in [(0, 33), (32, 1), (33, 0), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
        assert_invalid(memory.read(ME, "r", offset, size), "is beyond its 32 bytes");
    }
    assert_invalid(memory.write(ME, "r", 30, &[0; 3]), "is beyond its 32 bytes");
    assert_invalid(memory.write(ME, "r", u64::MAX, &[0; 3]), "is beyond its 32 bytes");
    assert!(matches!(memory.read(ME, "s", 0, 1), Err(ServiceError::NotFound(_))));
    assert_eq!(memory.read(ME, "r", 0, 32).unwrap().len(), 32);
}

#[test]
fn registrations_that_cannot_be_are_refused() {
    let object = SharedObject::new("refused", 64);
    let memory = SharedMemory::new();
    assert_invalid(memory.register(ME, "r", &object.key, 0, 65), "has 64 bytes, expected at least 65");
    assert_invalid(memory.register(ME, "r", &object.key, 60, 5), "has 64 bytes, expected at least 65");
    assert_invalid(memory.register(ME, "r", &object.key, u64::MAX, 5), "overflows");
    assert_invalid(memory.register(ME, "r", &object.key, 0, 0), "byte_size is 0");
    assert_invalid(memory.register(ME, "", &object.key, 0, 1), "must not be empty");
    let long = format!("/{}", "k".repeat(300));
    for key in ["", "/", "//x", "/..", "..", ".", "/../etc/passwd", "/a/b", "../../etc/passwd", "/a\0b", &long] {
        assert_invalid(memory.register(ME, "r", key, 0, 1), "is not a name of a shared memory object");
    }
    assert!(matches!(memory.register(ME, "r", "/downbeat-no-such-object", 0, 1), Err(ServiceError::NotFound(_))));
    assert_eq!(memory.status(ME, None).unwrap(), []);
    memory.register(ME, "r", &object.key, 0, 64).unwrap();
}

#[test]
fn a_name_is_registered_once_until_it_is_unregistered() {
    let object = SharedObject::new("twice", 64);
    let memory = SharedMemory::new();
    memory.register(ME, "b", &object.key, 0, 32).unwrap();
    memory.register(ME, "a", object.key.trim_start_matches('/'), 32, 32).unwrap();
    assert!(matches!(memory.register(ME, "b", &object.key, 0, 8), Err(ServiceError::AlreadyExists(_))));
    let region =
        |name: &str, key: &str, offset| RegionStatus { name: name.into(), key: key.into(), offset, byte_size: 32 };
    let a = region("a", object.key.trim_start_matches('/'), 32);
    let b = region("b", &object.key, 0);
    assert_eq!(memory.status(ME, None).unwrap(), [a.clone(), b.clone()]);
    assert_eq!(memory.status(ME, Some("b")).unwrap(), [b]);
    assert!(matches!(memory.status(ME, Some("c")), Err(ServiceError::NotFound(_))));
    memory.unregister(ME, "b").unwrap();
    memory.unregister(ME, "c").unwrap();
    assert_eq!(memory.status(ME, None).unwrap(), [a]);
    memory.register(ME, "b", &object.key, 0, 8).unwrap();
    memory.unregister_all(ME).unwrap();
    assert_eq!(memory.status(ME, None).unwrap(), []);
    assert!(matches!(memory.read(ME, "b", 0, 1), Err(ServiceError::NotFound(_))));
}

#[test]
fn an_object_that_shrinks_is_an_error_and_not_a_crash() {
    let object = SharedObject::new("shrunk", 8192);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 0, 8192).unwrap();
    object.resize(100);
    assert_invalid(memory.read(ME, "r", 0, 8192), "now has 100 bytes, expected 8192");
    assert_invalid(memory.write(ME, "r", 4096, &[1; 4]), "now has 100 bytes, expected 8192");
    assert_eq!(object.size(), 100, "a write does not make the object larger");
    assert_eq!(memory.read(ME, "r", 0, 100).unwrap().len(), 100);
    object.resize(8192);
    assert_eq!(memory.read(ME, "r", 0, 8192).unwrap().len(), 8192);
}

#[test]
fn an_unlinked_object_stays_until_it_is_unregistered() {
    let object = SharedObject::new("unlinked", 16);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 0, 16).unwrap();
    object.write(0, &[3; 16]);
    object.unlink();
    assert_eq!(&memory.read(ME, "r", 0, 16).unwrap()[..], [3; 16]);
}

#[test]
fn there_is_a_bound_on_regions() {
    let object = SharedObject::new("bound", 16);
    let memory = SharedMemory::new();
    // Test processes may open fewer files than a server.
    let mut registered = 0;
    let error = loop {
        match memory.register(ME, &format!("r{registered}"), &object.key, 0, 16) {
            Ok(()) => registered += 1,
            Err(error) => break error,
        }
        assert!(registered <= MAX_REGIONS);
    };
    match error {
        ServiceError::TooLarge(message) => assert!(message.contains("1024 regions")),
        ServiceError::Unavailable(message) => assert!(message.contains("cannot be opened")),
        other => panic!("{other:?}"),
    }
    memory.unregister_all(ME).unwrap();
    memory.register(ME, "r", &object.key, 0, 16).unwrap();
}

#[test]
fn a_region_belongs_to_who_registered_it() {
    let object = SharedObject::new("owned", 16);
    let memory = SharedMemory::new();
    let at = |address: &str| Client::at(address.parse().unwrap());
    let (one, other) = (at("192.0.2.1"), at("192.0.2.2"));
    memory.register(one, "r", &object.key, 0, 16).unwrap();
    memory.register(one, "s", &object.key, 0, 16).unwrap();
    object.write(0, &[3; 16]);
    assert!(matches!(memory.read(other, "r", 0, 1), Err(ServiceError::NotFound(_))));
    assert!(matches!(memory.write(other, "r", 0, &[1]), Err(ServiceError::NotFound(_))));
    assert!(matches!(memory.status(other, Some("r")), Err(ServiceError::NotFound(_))));
    assert_eq!(memory.status(other, None).unwrap(), []);
    memory.unregister(other, "r").unwrap();
    memory.unregister_all(other).unwrap();
    assert_eq!(memory.status(one, None).unwrap().len(), 2);
    // Names of other clients' regions are free.
    memory.register(other, "r", &object.key, 8, 8).unwrap();
    assert_eq!(memory.read(one, "r", 0, 16).unwrap().len(), 16);
    assert_invalid(memory.read(other, "r", 0, 16), "is beyond its 8 bytes");
    memory.unregister_all(one).unwrap();
    assert_eq!(memory.status(other, None).unwrap().len(), 1);

    assert_eq!(at("127.0.0.1").address(), at("127.8.8.8").address());
    assert_eq!(at("127.0.0.1").address(), at("::1").address());
    assert_eq!(at("192.0.2.1").address(), at("::ffff:192.0.2.1").address());
    assert_ne!(at("127.0.0.1").address(), ME.address());
}

#[test]
fn shared_memory_that_is_off_says_how_it_is_switched_on() {
    let object = SharedObject::new("off", 16);
    let memory = SharedMemory::disabled();
    assert_eq!(memory.status(ME, None).unwrap(), [], "no region is registered");
    assert_eq!(memory.cuda_status(ME, None).unwrap(), []);
    let missing = memory.status(ME, Some("r")).unwrap_err();
    assert!(matches!(&missing, ServiceError::NotFound(_)), "{missing:?}");
    let mut request = request(DataType::Uint8, &[2], place("r", 2, None), &[]);
    let errors = [
        memory.register(ME, "r", &object.key, 0, 16).unwrap_err(),
        memory.unregister(ME, "r").unwrap_err(),
        memory.unregister_all(ME).unwrap_err(),
        resolve_inputs(&memory, ME, &mut request).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, ServiceError::Unimplemented(_)), "{error:?}");
        assert!(
            error.to_string().contains("Client shared memory is disabled. Start the server with '--shared-memory'")
        );
    }
}

fn place(region: &str, byte_size: i64, offset: Option<i64>) -> Parameters {
    let mut parameters = Parameters::from([
        ("shared_memory_region".into(), Parameter::String(region.into())),
        ("shared_memory_byte_size".into(), Parameter::Int64(byte_size)),
    ]);
    parameters.extend(offset.map(|offset| ("shared_memory_offset".into(), Parameter::Int64(offset))));
    parameters
}

fn request(datatype: DataType, shape: &[i64], parameters: Parameters, data: &[u8]) -> InferRequest {
    InferRequest {
        inputs: vec![InferTensor {
            name: "x".into(),
            datatype,
            shape: shape.to_vec(),
            parameters,
            data: data.to_vec().into(),
        }],
        ..Default::default()
    }
}

#[test]
fn inputs_are_taken_from_shared_memory() {
    let object = SharedObject::new("inputs", 64);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 8, 56).unwrap();
    object.write(12, &[1, 2, 3, 4]);
    let mut shared = request(DataType::Uint8, &[2, 2], place("r", 4, Some(4)), &[]);
    resolve_inputs(&memory, ME, &mut shared).unwrap();
    assert_eq!(&shared.inputs[0].data[..], [1, 2, 3, 4]);
    let mut plain = request(DataType::Uint8, &[2], Parameters::new(), &[5, 6]);
    resolve_inputs(&memory, ME, &mut plain).unwrap();
    assert_eq!(&plain.inputs[0].data[..], [5, 6]);
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let object = SharedObject::new("misfits", 64);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 0, 64).unwrap();
    let resolve = |mut request: InferRequest| resolve_inputs(&memory, ME, &mut request).map(|()| request);
    let fp32 = |parameters, data: &[u8]| request(DataType::Fp32, &[2], parameters, data);
    assert_invalid(resolve(fp32(place("r", 8, None), &[0; 8])), "both data (8 bytes) and 'shared_memory_region'");
    assert_invalid(
        resolve(fp32(place("r", 7, None), &[])),
        "input 'x': 'shared_memory_byte_size' is 7, expected 8 for shape [2] of FP32",
    );
    assert_invalid(resolve(fp32(place("r", -8, None), &[])), "is -8, expected an integer of at least 0");
    assert_invalid(resolve(fp32(place("r", 8, Some(-1)), &[])), "'shared_memory_offset' is -1");
    assert_invalid(resolve(fp32(place("r", 8, Some(60)), &[])), "input 'x': shared memory region 'r': offset 60");
    let mut sizeless = place("r", 8, None);
    sizeless.remove("shared_memory_byte_size");
    assert_invalid(resolve(fp32(sizeless, &[])), "no 'shared_memory_byte_size'");
    let mut number = place("r", 8, None);
    number.insert("shared_memory_region".into(), Parameter::Bool(true));
    assert_invalid(resolve(fp32(number, &[])), "'shared_memory_region' is true, expected a string");
    match resolve(fp32(place("s", 8, None), &[])) {
        Err(ServiceError::NotFound(message)) => {
            assert_eq!(message, "input 'x': shared memory region 's' is not registered");
        }
        other => panic!("{other:?}"),
    }
    // Strings hold their lengths themselves; the server checks them once it has read them.
    object.write(0, &[1, 0, 0, 0, b'a']);
    let strings = resolve(request(DataType::Bytes, &[1], place("r", 5, None), &[])).unwrap();
    assert_eq!(&strings.inputs[0].data[..], [1, 0, 0, 0, b'a']);
    assert_invalid(resolve(request(DataType::Bytes, &[2], place("r", 5, None), &[])), "has 2 elements, got 1");
}

#[test]
fn outputs_go_to_shared_memory() {
    let object = SharedObject::new("outputs", 64);
    let memory = SharedMemory::new();
    memory.register(ME, "r", &object.key, 0, 64).unwrap();
    let output = |name: &str| InferTensor {
        name: name.into(),
        datatype: DataType::Uint8,
        shape: vec![4],
        parameters: Parameters::new(),
        data: vec![1, 2, 3, 4].into(),
    };
    let answer = || InferResponse { outputs: vec![output("x"), output("y")], ..Default::default() };
    let apply = |parameters: Parameters| {
        let mut response = answer();
        let requested = [RequestedOutput { name: "y".into(), parameters }];
        apply_outputs(&memory, ME, |_| Vec::new(), false, &requested, &mut response.outputs).map(|()| response)
    };
    let response = apply(place("r", 10, Some(8))).unwrap();
    assert_eq!(object.read(7, 6), [0, 1, 2, 3, 4, 0]);
    assert_eq!(response.outputs[0], output("x"));
    assert_eq!(response.outputs[1].data.len(), 0);
    assert_eq!(
        response.outputs[1].parameters,
        Parameters::from([
            ("shared_memory_region".into(), Parameter::String("r".into())),
            ("shared_memory_byte_size".into(), Parameter::Uint64(4)),
            ("shared_memory_offset".into(), Parameter::Uint64(8)),
        ])
    );
    assert_invalid(apply(place("r", 3, None)), "output 'y': 'shared_memory_byte_size' is 3, expected at least 4");
    assert_invalid(apply(place("r", 4, Some(61))), "output 'y': shared memory region 'r': offset 61");
    let mut both = place("r", 10, None);
    both.insert("classification".into(), Parameter::Int64(1));
    assert_invalid(apply(both), "both 'shared_memory_region' and 'classification'");
}
