//! Each repair: the repaired file answers as the same model in an old version does.

use downbeat_engine::onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto};
use downbeat_engine::{Engine, LoadOptions, Rten, inspect};
use downbeat_repair::{RepairedFile, repair};
use prost::Message;

use crate::support::*;

const FLOAT: i32 = 1;
const INT64: i32 = 7;
const STRING: i32 = 8;
const DOUBLE: i32 = 11;

fn relu(ir_version: i64, opset: i64) -> ModelProto {
    let graph = graph(
        vec![node("Relu", &["x"], &["y"], Vec::new())],
        vec![value("x", FLOAT, &[-1, 2])],
        vec![value("y", FLOAT, &[-1, 2])],
    );
    model(ir_version, &[("", opset)], graph)
}

#[test]
fn files_that_engines_read_are_left_alone() {
    for (ir, opset) in [(3, 7), (10, 20), (13, 26)] {
        assert!(RepairedFile::of(&File::of(&relu(ir, opset)).path()).unwrap().is_none());
    }
    for name in ["mlp", "digits", "encoder"] {
        let path = format!("{}/../../examples/models/{name}/1/model.onnx", env!("CARGO_MANIFEST_DIR"));
        assert!(std::path::Path::new(&path).exists(), "{path}");
        assert!(repair(path.as_ref()).unwrap().is_none(), "{name}");
    }
}

#[test]
fn newer_versions_of_format_and_operators_are_lowered() {
    let (old, new) = (File::of(&relu(8, 15)), File::of(&relu(14, 28)));
    let repaired = new.repaired();
    let made = ModelProto::decode(&*std::fs::read(repaired.path()).unwrap()).unwrap();
    let expected = ModelProto { ir_version: 10, ..relu(10, 26) };
    assert_eq!(made, expected, "nothing else has changed");
    let answer = |path: &std::path::Path| floats(&run(path, &[2, 2], &[-1.0, 2.0, 3.0, -4.0]).unwrap()[0]);
    assert_eq!(answer(&repaired.path()), answer(&old.path()));
    let refused = Rten::new().load(&LoadOptions::new(new.path(), 1)).err().unwrap().to_string();
    assert!(refused.contains("version 14 of the ONNX format"), "{refused}");
    assert_eq!(
        repaired.summary(),
        "repaired before loading: it has version 10 of the format in place of 14; it has version 26 of the operators in place of 28, \
         which has the same operators"
    );
    assert!(RepairedFile::of(&repaired.path()).unwrap().is_none(), "once is enough");
}

#[test]
fn a_version_that_is_not_known_is_refused_with_a_remedy() {
    let refused = File::of(&relu(10, 29)).refused();
    assert!(refused.contains("version 29 of the ONNX operators, the newest known here is 28. Export it"), "{refused}");
    // A later format that uses no part of its own is lowered.
    assert!(File::of(&relu(15, 20)).repaired().summary().contains("in place of 15"));
    let mut bytes = relu(15, 20).encode_to_vec();
    // A number in field 30.
    bytes.extend([0xf0, 1, 1]);
    let refused = File::with(&bytes).refused();
    assert!(refused.contains("its model uses a part that version 14 lacks. Save it"), "{refused}");
}

fn one_operator(operator: NodeProto, opset: i64) -> File {
    let graph = graph(vec![operator], vec![value("x", FLOAT, &[1, 1, 2, 2])], vec![value("y", FLOAT, &[1, 4, 1, 1])]);
    File::of(&model(10, &[("", opset)], graph))
}

#[test]
fn attributes_of_newer_operators_are_taken_away_only_if_they_change_nothing() {
    let space = |mode: &[&str], opset| {
        let mut attributes = vec![AttributeProto::int("blocksize", 2)];
        attributes.extend(mode.iter().map(|mode| AttributeProto::text("mode", mode)));
        one_operator(node("SpaceToDepth", &["x"], &["y"], attributes), opset)
    };
    let made = |file: &File| {
        let made = ModelProto::decode(&*std::fs::read(file.repaired().path()).unwrap()).unwrap();
        made.graph.unwrap().node[0].attribute.len()
    };
    assert_eq!((made(&space(&["DCR"], 28)), made(&space(&[], 28))), (1, 1));
    let refused = space(&["CRD"], 28).refused();
    assert!(refused.contains("its operator SpaceToDepth ('the SpaceToDepth') has mode = \"CRD\""), "{refused}");
    let refused = one_operator(node("SwiGLU", &["x", "x"], &["y"], Vec::new()), 28).refused();
    assert!(refused.contains("came with version 28") && refused.contains("opset_version=20"), "{refused}");
    let summary = space(&["DCR"], 28).repaired().summary();
    assert!(summary.ends_with("without attributes of SpaceToDepth that change no answer"), "{summary}");
}

#[test]
fn operators_inside_of_others_are_lowered_too() {
    let range = || node("Range", &["from", "to", "by"], &["r"], vec![AttributeProto::int("stash_type", 1)]);
    let inner = graph(vec![range()], Vec::new(), vec![value("r", FLOAT, &[-1])]);
    let mut choice = node("If", &["c"], &["y"], Vec::new());
    choice.attribute = vec![graph_attribute("then_branch", &inner), graph_attribute("else_branch", &inner)];
    let outer = GraphProto {
        initializer: vec![weight("from", &[], &[0.0]), weight("to", &[], &[3.0]), weight("by", &[], &[1.0])],
        ..graph(vec![choice], vec![value("c", 9, &[])], vec![value("y", FLOAT, &[-1])])
    };
    let file = File::of(&model(10, &[("", 27)], outer));
    let bytes = std::fs::read(file.repaired().path()).unwrap();
    assert!(!bytes.windows(10).any(|window| window == b"stash_type"));
    assert!(bytes.windows(11).filter(|window| window == b"then_branch" || window == b"else_branch").count() == 2);
}

/// Scores of two classes by a product, and a `ZipMap`.
fn zipped(classes: AttributeProto, element: i32, opsets: &[(&str, i64)]) -> ModelProto {
    let graph = GraphProto {
        initializer: vec![weight("w", &[2, 2], &[1.0, 2.0, 3.0, 4.0])],
        ..graph(
            vec![
                node("MatMul", &["x", "w"], &["scores"], Vec::new()),
                of_ml(node("ZipMap", &["scores"], &["output_probability"], vec![classes])),
            ],
            vec![value("x", FLOAT, &[-1, 2])],
            vec![list("output_probability", element)],
        )
    };
    model(8, opsets, graph)
}

#[test]
fn a_list_of_maps_becomes_a_tensor_with_labels() {
    let classes = AttributeProto::ints("classlabels_int64s", vec![7, -1]);
    let file = File::of(&zipped(classes, FLOAT, &[("", 13), (ML, 1)]));
    let refused = Rten::new().load(&LoadOptions::new(file.path(), 1)).err().unwrap().to_string();
    assert!(refused.contains("is a sequence"), "{refused}");
    let repaired = file.repaired();
    assert_eq!(repaired.labels["output_probability"], ["7", "-1"]);
    let signature = inspect(&repaired.path()).unwrap();
    assert_eq!((&*signature.outputs[0].name, &*signature.outputs[0].dims), ("output_probability", &[-1, 2][..]));
    let answer = run(&repaired.path(), &[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]).unwrap();
    assert_eq!(floats(&answer[0]), (vec![3, 2], vec![1.0, 2.0, 3.0, 4.0, 4.0, 6.0]));
    let file = File::of(&zipped(strings("classlabels_strings", &["no", "yes"]), DOUBLE, &[("", 13), (ML, 1)]));
    assert_eq!(file.repaired().labels["output_probability"], ["no", "yes"]);
    assert_eq!(inspect(&file.repaired().path()).unwrap().outputs[0].datatype.name(), "FP64");
}

#[test]
fn a_file_without_operators_of_the_standard_imports_them_for_the_tensor() {
    let graph = graph(
        vec![of_ml(node("ZipMap", &["x"], &["y"], vec![strings("classlabels_strings", &["a"])]))],
        vec![value("x", FLOAT, &[-1, 1])],
        vec![list("y", FLOAT)],
    );
    let file = File::of(&model(8, &[(ML, 1)], graph));
    assert_eq!(floats(&run(&file.repaired().path(), &[1, 1], &[5.0]).unwrap()[0]).1, [5.0]);
}

#[test]
fn lists_that_cannot_become_tensors_are_refused() {
    let file = File::of(&zipped(AttributeProto::int("other", 1), FLOAT, &[("", 13), (ML, 1)]));
    assert!(file.refused().contains("ZipMap has no classes"), "{}", file.refused());
    let mut read = zipped(strings("classlabels_strings", &["a", "b"]), FLOAT, &[("", 13), (ML, 1)]);
    let graph = read.graph.as_mut().unwrap();
    graph.node.push(node("SequenceLength", &["output_probability"], &["n"], Vec::new()));
    let refused = File::of(&read).refused();
    assert!(refused.contains("another operator reads the list. Export it with the option zipmap=False"), "{refused}");
    // Another operator makes this list, and the engine refuses the file.
    let mut other = zipped(strings("classlabels_strings", &["a", "b"]), FLOAT, &[("", 13), (ML, 1)]);
    other.graph.as_mut().unwrap().node[1].op_type = "CastMap".into();
    assert!(RepairedFile::of(&File::of(&other).path()).unwrap().is_none());
}

#[test]
fn labels_of_a_classifier_have_as_many_rows_as_the_request() {
    let of = |rows: i64, dims: &[i64], op_type: &str| {
        let graph = graph(
            vec![
                of_ml(node(op_type, &["x"], &["l", "scores"], Vec::new())),
                node("Cast", &["l"], &["label"], vec![AttributeProto::int("to", 7)]),
            ],
            vec![value("x", FLOAT, &[rows, 4])],
            vec![value("label", INT64, dims)],
        );
        File::of(&model(8, &[("", 9), (ML, 1)], graph))
    };
    let wrong = of(-1, &[1], "TreeEnsembleClassifier");
    assert_eq!(inspect(&wrong.repaired().path()).unwrap().outputs[0].dims, [-1]);
    for right in [of(1, &[1], "TreeEnsembleClassifier"), of(-1, &[-1], "SVMClassifier"), of(-1, &[1], "Scaler")] {
        assert!(RepairedFile::of(&right.path()).unwrap().is_none());
    }
}

#[test]
fn a_locale_that_machines_lack_is_replaced() {
    let of = |attributes: Vec<AttributeProto>| {
        let graph = graph(
            vec![node("StringNormalizer", &["x"], &["y"], attributes)],
            vec![value("x", STRING, &[-1])],
            vec![value("y", STRING, &[-1])],
        );
        File::of(&model(8, &[("", 13)], graph))
    };
    let locale = |file: &File| {
        let made = ModelProto::decode(&*std::fs::read(file.repaired().path()).unwrap()).unwrap();
        let attribute = made.graph.unwrap().node[0].attribute.last().unwrap().clone();
        AttributeProto::decode(attribute).unwrap().s.unwrap()
    };
    assert_eq!(locale(&of(Vec::new())), "C.UTF-8");
    assert_eq!(locale(&of(vec![AttributeProto::text("locale", "en_US")])), "C.UTF-8");
    // Turkish has other letters.
    let turkish = of(vec![AttributeProto::text("locale", "tr_TR.UTF-8")]);
    assert!(RepairedFile::of(&turkish.path()).unwrap().is_none());
}

#[test]
fn external_data_stays_where_it_is_under_any_name() {
    let graph = GraphProto {
        initializer: vec![external_weight("w", &[2, 2], "deep/the weights.bin", 4, 16)],
        ..graph(
            vec![node("MatMul", &["x", "w"], &["y"], Vec::new())],
            vec![value("x", FLOAT, &[-1, 2])],
            vec![value("y", FLOAT, &[-1, 2])],
        )
    };
    for (ir, opset) in [(9, 13), (14, 28)] {
        let file = File::of(&model(ir, &[("", opset)], graph.clone()));
        std::fs::create_dir(file.folder.path().join("deep")).unwrap();
        let weights: Vec<u8> = [9f32, 1.0, 2.0, 3.0, 4.0].iter().flat_map(|float| float.to_le_bytes()).collect();
        std::fs::write(file.folder.path().join("deep/the weights.bin"), weights).unwrap();
        let repaired = RepairedFile::of(&file.path()).unwrap();
        assert_eq!(repaired.is_some(), ir == 14);
        let path = repaired.as_ref().map_or(file.path(), RepairedFile::path);
        assert_eq!(floats(&run(&path, &[1, 2], &[1.0, 1.0]).unwrap()[0]).1, [4.0, 6.0]);
        let beside = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(beside, 2, "the model, and the weights or a link to the file");
        std::fs::write(file.folder.path().join("deep/the weights.bin"), [0; 8]).unwrap();
        let refused = run(&path, &[1, 2], &[1.0, 1.0]).unwrap_err();
        assert!(refused.contains("which has 8 bytes"), "{refused}");
    }
}

#[test]
fn a_link_to_another_file_counts_only_in_a_folder_of_the_server() {
    let file = File::of(&relu(14, 20));
    let repaired = file.repaired();
    assert_eq!(downbeat_engine::onnx::data_folder(&repaired.path()), file.folder.path());
    // The owner of a model could make such a link, too.
    let other = tempfile::tempdir().unwrap();
    std::fs::set_permissions(other.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::copy(file.path(), other.path().join("m.onnx")).unwrap();
    std::os::unix::fs::symlink(file.path(), other.path().join(downbeat_engine::onnx::ORIGINAL)).unwrap();
    assert_eq!(downbeat_engine::onnx::data_folder(&other.path().join("m.onnx")), other.path());
}
