//! Operators that an engine computes wrong are replaced by others that it computes right. Every
//! engine gives the answer of the standard.

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Cut, Engine, LoadOptions, Rten, State, Tensor};

use crate::engines::engines;
use crate::model::{self, AttributeProto, BOOL, FLOAT, INT8, INT32, INT64, ModelProto, NodeProto, TensorProto, UINT8};
use crate::support::{floats, lane, load, run, try_load};

/// A model of one operator from `x` to `y`.
fn of_one(
    op_type: &str,
    attribute: Vec<AttributeProto>,
    (x, dims): (i32, &[i64]),
    (y, answer): (i32, &[i64]),
    weights: Vec<TensorProto>,
) -> ModelProto {
    let names: Vec<&str> = std::iter::once("x").chain(weights.iter().map(|weight| weight.name.as_str())).collect();
    let node = NodeProto { attribute, ..model::node(op_type, &names, &["y"]) };
    let (input, output) = (model::value("x", x, dims), model::value("y", y, answer));
    model::model(vec![node], weights.clone(), vec![input], vec![output])
}

fn numbers<const N: usize>(datatype: DataType, shape: &[usize], elements: impl Iterator<Item = [u8; N]>) -> Tensor {
    let mut data = Buffer::with_capacity(0);
    elements.for_each(|element| data.extend_from_slice(&element));
    Tensor { datatype, shape: shape.to_vec(), data }
}

fn unsigned(shape: &[usize], elements: &[u8]) -> Tensor {
    numbers(DataType::Uint8, shape, elements.iter().map(|byte| [*byte]))
}

fn int64(shape: &[usize], elements: &[i64]) -> Tensor {
    numbers(DataType::Int64, shape, elements.iter().map(|n| n.to_le_bytes()))
}

fn int32(shape: &[usize], elements: &[i32]) -> Tensor {
    numbers(DataType::Int32, shape, elements.iter().map(|n| n.to_le_bytes()))
}

/// Runs a model on every engine of this machine.
fn expect(what: &str, proto: &ModelProto, x: Tensor, expected: &Tensor) {
    let folder = model::folder();
    let path = model::write(folder.path(), "model.onnx", proto);
    for engine in engines() {
        let name = engine.info().name;
        let loaded = load(&*engine, &path);
        let given = Tensor { datatype: x.datatype, shape: x.shape.clone(), data: Buffer::from(x.data.as_slice()) };
        let answer = run(&mut *lane(&*loaded), vec![given]).unwrap_or_else(|e| panic!("{what} on {name}: {e}"));
        assert_eq!(answer[0].shape, expected.shape, "{what} on {name}");
        assert_eq!(answer[0].data.as_slice(), expected.data.as_slice(), "{what} on {name}: {:?}", answer[0]);
    }
}

#[test]
fn the_sign_of_zero_is_zero() {
    let proto = of_one("Sign", vec![], (FLOAT, &[4]), (FLOAT, &[4]), vec![]);
    let x = floats(&[4], &[-2.5, 0.0, 3.0, f32::INFINITY]);
    expect("Sign", &proto, x, &floats(&[4], &[-1.0, 0.0, 1.0, 1.0]));
}

#[test]
fn of_equal_elements_the_first_is_taken() {
    let attributes = |operator: &str, last: i64| {
        let attribute = vec![model::int("axis", 1), model::int("keepdims", 0), model::int("select_last_index", last)];
        of_one(operator, attribute, (FLOAT, &[-1, 3]), (INT64, &[-1]), vec![])
    };
    let x = || floats(&[3, 3], &[2.0, 2.0, 1.0, 1.0, 3.0, 3.0, 0.0, 0.0, 0.0]);
    expect("ArgMax", &attributes("ArgMax", 0), x(), &int64(&[3], &[0, 1, 0]));
    expect("ArgMin", &attributes("ArgMin", 0), x(), &int64(&[3], &[2, 0, 0]));
    expect("the last ArgMax", &attributes("ArgMax", 1), x(), &int64(&[3], &[1, 2, 2]));
}

#[test]
fn an_odd_element_of_padding_comes_first_where_it_is_asked_for() {
    let attribute = |stride: i64| {
        vec![
            model::ints("kernel_shape", &[2]),
            model::ints("strides", &[stride]),
            model::text("auto_pad", "SAME_LOWER"),
        ]
    };
    let pool = |operator: &str, stride| {
        of_one(operator, attribute(stride), (FLOAT, &[1, 1, -1]), (FLOAT, &[1, 1, -1]), vec![])
    };
    let x = || floats(&[1, 1, 3], &[1.0, 5.0, 3.0]);
    expect("MaxPool", &pool("MaxPool", 1), x(), &floats(&[1, 1, 3], &[1.0, 5.0, 5.0]));
    expect("AveragePool", &pool("AveragePool", 1), x(), &floats(&[1, 1, 3], &[1.0, 3.0, 4.0]));
    expect("MaxPool by 2", &pool("MaxPool", 2), x(), &floats(&[1, 1, 2], &[1.0, 5.0]));
    expect("AveragePool by 2", &pool("AveragePool", 2), x(), &floats(&[1, 1, 2], &[1.0, 4.0]));
    let kernel = || vec![model::floats("w", &[1, 1, 2], &[1.0, 10.0])];
    let convolution = |stride| of_one("Conv", attribute(stride), (FLOAT, &[1, 1, -1]), (FLOAT, &[1, 1, -1]), kernel());
    expect("Conv", &convolution(1), x(), &floats(&[1, 1, 3], &[10.0, 51.0, 35.0]));
    expect("Conv by 2", &convolution(2), x(), &floats(&[1, 1, 2], &[10.0, 35.0]));
    let transposed = of_one("ConvTranspose", attribute(1), (FLOAT, &[1, 1, 3]), (FLOAT, &[1, 1, 3]), kernel());
    expect("ConvTranspose", &transposed, x(), &floats(&[1, 1, 3], &[15.0, 53.0, 30.0]));
}

#[test]
fn several_matrices_times_a_vector_have_no_axis_left_over() {
    let vector = vec![model::floats("v", &[2], &[1.0, 10.0])];
    let proto = of_one("MatMul", vec![], (FLOAT, &[-1, 1, 2, 2]), (FLOAT, &[-1, 1, 2]), vector);
    expect("MatMul", &proto, floats(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]), &floats(&[1, 1, 2], &[21.0, 43.0]));
}

#[test]
fn numbers_are_quantised_by_a_quotient() {
    let proto = of_one("DynamicQuantizeLinear", vec![], (FLOAT, &[6]), (UINT8, &[6]), vec![]);
    let mut proto = proto;
    if let Some(node) = proto.graph.as_mut().and_then(|graph| graph.node.first_mut()) {
        node.output.extend(["scale".to_owned(), "zero".to_owned()]);
    }
    let x = floats(&[6], &[0.0, 2.0, -3.0, -2.5, 1.34, 0.5]);
    expect("DynamicQuantizeLinear", &proto, x, &unsigned(&[6], &[153, 255, 0, 26, 221, 179]));
}

#[test]
fn softmax_before_version_13_takes_all_axes_behind_its_own() {
    let mut proto = of_one("Softmax", vec![model::int("axis", 1)], (FLOAT, &[1, 2, 2]), (FLOAT, &[1, 2, 2]), vec![]);
    proto.opset_import[0].version = 11;
    expect("Softmax 11", &proto, floats(&[1, 2, 2], &[1.0; 4]), &floats(&[1, 2, 2], &[0.25; 4]));
    proto.opset_import[0].version = 13;
    expect("Softmax 13", &proto, floats(&[1, 2, 2], &[1.0; 4]), &floats(&[1, 2, 2], &[0.5; 4]));
}

#[test]
fn quantised_products_keep_their_zero_points() {
    let zeros = || vec![model::bytes("za", UINT8, &[], &[1]), model::bytes("zb", INT8, &[], &[2])];
    let mut weights = vec![model::bytes("w", INT8, &[2, 1], &[3, 254])];
    weights.extend(zeros());
    let proto = of_one("MatMulInteger", vec![], (UINT8, &[-1, 2]), (INT32, &[-1, 1]), weights);
    expect("MatMulInteger", &proto, unsigned(&[2, 2], &[1, 2, 3, 1]), &int32(&[2, 1], &[-4, 2]));
}

/// Two images, padded: RTen packs the kernel once for both.
#[test]
fn quantised_convolutions_keep_their_zero_points() {
    let attribute = vec![model::ints("kernel_shape", &[1, 2]), model::ints("pads", &[0, 0, 0, 1])];
    let weights = vec![
        model::bytes("w", INT8, &[2, 1, 1, 2], &[1, 2, 255, 3]),
        model::bytes("zx", UINT8, &[], &[10]),
        model::bytes("zw", INT8, &[], &[1]),
    ];
    let proto = of_one("ConvInteger", attribute, (UINT8, &[-1, 1, 1, 2]), (INT32, &[-1, 2, 1, 2]), weights);
    // (x - 10) times (w - 1), which is 0, 1 and -2, 2. A padded element is 10 - 10.
    let expected = int32(&[2, 2, 1, 2], &[1, 0, 0, -2, -3, 0, -10, 6]);
    expect("ConvInteger", &proto, unsigned(&[2, 1, 1, 2], &[11, 11, 12, 7]), &expected);
}

#[test]
fn what_is_not_zero_is_true() {
    let proto = of_one("Cast", vec![model::int("to", BOOL.into())], (FLOAT, &[3]), (BOOL, &[3]), vec![]);
    let expected = numbers(DataType::Bool, &[3], [[1u8], [0], [1]].into_iter());
    expect("Cast", &proto, floats(&[3], &[0.5, 0.0, -2.0]), &expected);
}

#[test]
fn a_large_number_is_its_own_softplus() {
    let proto = of_one("Softplus", vec![], (FLOAT, &[2]), (FLOAT, &[2]), vec![]);
    expect("Softplus", &proto, floats(&[2], &[1000.0, -1000.0]), &floats(&[2], &[1000.0, 0.0]));
}

/// The error names the engine that computes the operator right.
#[test]
fn what_no_other_operators_give_is_refused() {
    let refused = |proto: &ModelProto| {
        let folder = model::folder();
        let path = model::write(folder.path(), "model.onnx", proto);
        try_load(&Rten::new(), &path).err().expect("it is refused").to_string()
    };
    let mut resize =
        of_one("Resize", vec![model::text("mode", "cubic")], (FLOAT, &[1, 1, 2, 2]), (FLOAT, &[1, 1, 4, 4]), vec![]);
    if let Some(graph) = &mut resize.graph {
        graph.node[0].input.extend([String::new(), "scales".to_owned()]);
        graph.initializer.push(model::floats("scales", &[4], &[1.0, 1.0, 2.0, 2.0]));
    }
    let said = refused(&resize);
    assert!(said.contains("it computes Resize ('Resize_y') wrong: it interpolates linearly"), "{said}");
    assert!(said.contains("`downbeat engine install` fetches it") && said.contains("--engine onnxruntime"), "{said}");
    let mut lstm =
        of_one("LSTM", vec![model::int("hidden_size", 1)], (FLOAT, &[2, 1, 1]), (FLOAT, &[2, 1, 1, 1]), vec![]);
    if let Some(graph) = &mut lstm.graph {
        graph.node[0].input.extend(["w", "r", "", "lengths"].map(str::to_owned));
        graph.initializer.push(model::floats("w", &[1, 4, 1], &[1.0; 4]));
        graph.initializer.push(model::floats("r", &[1, 4, 1], &[1.0; 4]));
        graph.initializer.push(model::bytes("lengths", INT32, &[1], &[1, 0, 0, 0]));
    }
    let said = refused(&lstm);
    assert!(said.contains("it takes no notice of sequence_lens"), "{said}");
}

/// The rewrite also reaches graphs inside an operator, which know nothing about values from
/// outside.
#[test]
fn a_graph_inside_an_operator_is_rewritten_too() {
    const GRAPH: i32 = 5;
    let branch = |name: &str, node: NodeProto| {
        let output = vec![model::value("inner", FLOAT, &[2])];
        let graph = model::GraphProto { name: name.into(), node: vec![node], output, ..Default::default() };
        AttributeProto { name: name.into(), g: Some(graph), r#type: GRAPH, ..AttributeProto::default() }
    };
    let attribute = vec![
        branch("then_branch", model::node("Sign", &["x"], &["inner"])),
        branch("else_branch", model::node("Neg", &["x"], &["inner"])),
    ];
    let node = NodeProto { attribute, ..model::node("If", &["yes"], &["y"]) };
    let (input, output) = (model::value("x", FLOAT, &[2]), model::value("y", FLOAT, &[2]));
    let proto = model::model(vec![node], vec![model::bytes("yes", BOOL, &[], &[1])], vec![input], vec![output]);
    expect("If", &proto, floats(&[2], &[0.0, -3.0]), &floats(&[2], &[0.0, -1.0]));
}

/// A model is cut by the operators of its file, and reports which of them are replaced.
#[test]
fn a_rewritten_model_is_cut_as_its_file_is() {
    let folder = model::folder();
    let nodes = vec![
        model::node("Neg", &["x"], &["a"]),
        model::node("Sign", &["a"], &["b"]),
        model::node("Abs", &["b"], &["c"]),
        model::node("Sign", &["c"], &["y"]),
    ];
    let (input, output) = (model::value("x", FLOAT, &[-1, 2]), model::value("y", FLOAT, &[-1, 2]));
    let path = model::write(folder.path(), "model.onnx", &model::model(nodes, vec![], vec![input], vec![output]));
    let options = LoadOptions::new(&path, 1).with_cut(Cut::At(vec!["Sign_b".to_owned()]));
    let model = Rten::new().load(&options).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.segments(), 2);
    assert_eq!(
        model.rewritten(),
        Some("some operators are replaced, as rten lacks them or computes them wrong: 2 Sign")
    );
    let mut state = State { tensors: vec![floats(&[1, 2], &[0.0, 7.0])] };
    let mut lane = lane(&*model);
    lane.run(0..1, &mut state).unwrap_or_else(|e| panic!("{e}"));
    lane.run(1..2, &mut state).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(state.tensors[0].data.as_slice(), floats(&[1, 2], &[0.0, 1.0]).data.as_slice());
}
