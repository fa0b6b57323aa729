mod model;

use std::path::Path;

use bytes::Bytes;
use prost::Message;

use super::{RowReport, Rows, report_of, row_report};
use crate::onnx::proto::{AttributeProto, FunctionProto, ModelProto};
use crate::onnx::sizes::{Input, Sizes};
use model::model;

/// `independent`, or `mixed` or `unknown` with the operator.
fn verdict(text: &str, opset: i64) -> String {
    match report_of(model(text, opset)).map(|report| report.rows) {
        Ok(Rows::Independent) => "independent".into(),
        Ok(Rows::Mixed(cause)) => format!("mixed {}", cause.operator),
        Ok(Rows::Unknown(cause)) => format!("unknown {}", cause.operator),
        Err(error) => error,
    }
}

/// The sizes of the output `y` of a graph with an input of these sizes.
pub(in crate::onnx) fn sizes_of(text: &str, dims: &[usize]) -> Option<Vec<u64>> {
    let sizes = Sizes::new(&model::graph(text)).unwrap();
    let (_, values) = sizes.walk([Some(Input { dims, data: &[] })].into_iter(), |_, _| ());
    let id = sizes.names.iter().position(|name| name == "y")?;
    Some(values.get(id)?.as_ref()?.dims.as_ref()?.to_vec())
}

fn check(cases: &[(&str, &str)]) {
    check_with(17, cases);
}

fn check_with(opset: i64, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(verdict(text, opset), *expected, "opset {opset}: {text}: {:?}", report_of(model(text, opset)));
    }
}

/// The small models of the issue: none may be joined with the requests of strangers.
#[test]
fn models_that_mix_requests_are_mixed_by_the_operator() {
    check(&[
        ("x[N,4]; y=Softmax(x) axis=0; -> y[N,4]", "mixed Softmax"),
        ("x[N,4]; a=i(0)!; y=CumSum(x,a); -> y[N,4]", "mixed CumSum"),
        ("x[A,B]; y=Transpose(x); -> y[B,A]", "mixed Transpose"),
        ("x[A,K]; y[K,B]; z=MatMul(x,y); -> z[A,B]", "mixed MatMul"),
        ("x[?,?]; y[?,?]; z=MatMul(x,y); -> z[?,?]", "mixed MatMul"),
        ("x[A,B]; n=NonZero(x); y=Transpose(n); -> y[?,2]", "mixed NonZero"),
        ("x[A,3]; k:i[B]; y=Gather(x,k); -> y[B,3]", "mixed Gather"),
        ("x[A,3]; y[B,3]; z=Concat(x,y) axis=0; -> z[C,3]", "mixed Concat"),
        ("x[A,3]; y[B,3]; z=Add(x,y); -> z[C,3]", "mixed input"),
        (
            "x[N,64]; w=f[64,10]; s=f[1]; q,qs,qz=DynamicQuantizeLinear(x); m=MatMulInteger(q,w,qz); c=Cast(m) to=1; \
             t=Mul(qs,s); y=Mul(c,t); -> y[N,10]",
            "mixed DynamicQuantizeLinear",
        ),
    ]);
}

#[test]
fn operators_along_the_axis_of_rows_are_mixed() {
    check(&[
        ("x[N,4]; y=ReduceMean(x) axes=0, keepdims=1; z=Sub(x,y); -> z[N,4]", "mixed ReduceMean"),
        ("x[N,4]; k=i(2); v,i=TopK(x,k) axis=0; -> v[K,4]", "mixed TopK"),
        ("x[N,4]; y=Transpose(x) perm=1,0; z=Softmax(y) axis=1; t=Transpose(z) perm=1,0; -> t[N,4]", "mixed Softmax"),
        ("x[N,4]; s=i(-1); y=Reshape(x,s); z=Softmax(y); t=i(-1,4); u=Reshape(z,t); -> u[N,4]", "mixed Softmax"),
        ("x[N,3,8,8]; y=MeanVarianceNormalization(x); -> y[N,3,8,8]", "mixed MeanVarianceNormalization"),
        ("x[N,3]; g=f[3]; y=BatchNormalization(x,g,g,g,g) training_mode=1; -> y[N,3]", "mixed BatchNormalization"),
        ("x[N,8,4]; w=f[1,8,4]; r=f[1,8,2]; y,h=LSTM(x,w,r) hidden_size=2; -> y[N,1,8,2]", "mixed LSTM"),
        ("x[N,3]; t=Transpose(x); y=MatMul(x,t); -> y[N,M]", "mixed MatMul"),
        ("x[N,3]; a=i(0); b=i(1); y=Slice(x,a,b,a); z=Add(x,y); -> z[N,3]", "mixed Slice"),
        ("x[N,3]; a=i(-1); b=i(-9223372036854775807); c=i(0); y=Slice(x,a,b,c,a); -> y[N,3]", "mixed Slice"),
        ("x[N,3]; k=i(0)!; y=Gather(x,k) axis=0; z=Add(x,y); -> z[N,3]", "mixed Gather"),
        ("x[N,3]; y=Einsum(x,x) equation=\"ab,cb->ac\"; -> y[N,M]", "mixed Einsum"),
        ("x[N,3]; y[N,4,3]; z=Add(x,y); -> z[N,4,3]", "mixed Add"),
        ("x[N,3]; c=f[2,3]; y=Add(x,c); -> y[N,3]", "mixed Add"),
        ("x[N,2,8,8]; p=i(1,0,0,0,0,0,0,0); y=Pad(x,p); -> y[N,2,8,8]", "mixed Pad"),
        ("x[N,1,4,4]; y,i=MaxPool(x) kernel_shape=2,2; -> y[N,1,3,3], i[N,1,3,3]", "mixed MaxPool"),
        ("x[N]; y=ml.TreeEnsembleRegressor(x) n_targets=1; -> y[N,1]", "mixed TreeEnsembleRegressor"),
        ("b[N,6,4]; s[N,1,6]; y=NonMaxSuppression(b,s); -> y[K,3]", "mixed NonMaxSuppression"),
    ]);
}

#[test]
fn outputs_that_cannot_be_cut_into_rows_are_mixed() {
    check(&[
        ("x[N,3]; y=Concat(x,x) axis=0; -> y[M,3]", "mixed Concat"),
        ("x[N,3]; s=i(-1); y=Reshape(x,s); -> y[M]", "mixed Reshape"),
        ("x[N,3]; s=i(1,3); y=Reshape(x,s); -> y[M,3]", "mixed Reshape"),
        ("x[N,3]; y=Shape(x); -> y[M]", "mixed Shape"),
        ("x[N,3]; w=f[3]; y=Relu(w); -> y[M]", "mixed Relu"),
        ("x[N,3]; y=ReduceSum(x) keepdims=0; -> y", "mixed ReduceSum"),
    ]);
}

/// A mean that is divided by the batch, and positions by row.
#[test]
fn the_number_of_rows_is_harmless_as_a_size_only() {
    let shape = "x[N,3]; s=Shape(x); z=i(0)!; o=i(1)!; b=Gather(s,z); ";
    let with = |rest: &str| format!("{shape}{rest}");
    check(&[
        (&with("f=Cast(b) to=1; y=Div(x,f); -> y[N,3]"), "mixed Div"),
        (&with("r=Range(z,b,o); f=Cast(r) to=1; a=i(1); u=Unsqueeze(f,a); y=Add(x,u); -> y[N,3]"), "mixed Add"),
        (&with("u=i(0); v=Unsqueeze(b,u); m=i(-1); t=Concat(v,m) axis=0; y=Reshape(x,t); -> y[N,3]"), "independent"),
        (&with("w=f[1,3]; e=Expand(w,s); y=Add(x,e); -> y[N,3]"), "independent"),
        (&with("e=ConstantOfShape(s); y=Concat(x,e) axis=1; -> y[N,6]"), "independent"),
        (&with("n=Size(x); q=Div(n,b); f=Cast(q) to=1; y=Div(x,f); -> y[N,3]"), "mixed Div"),
        // For an even number of rows the answer has the second column.
        (
            &with("t=i(2)!; m=Mod(b,t); u=i(0); a=i(1); v=Unsqueeze(m,u); w=Add(v,a); y=Slice(x,v,w,a); -> y[N,1]"),
            "unknown Slice",
        ),
        (&with("t=i(2)!; m=Mod(b,t); e=i(1); u=Unsqueeze(x,e); y=Trilu(u,m); -> y[N,1,3]"), "unknown Trilu"),
        // Only a batch of 5 takes the other branch, and 5 is none of the tried sizes.
        (
            &with(
                "k=i(5)!; e=Equal(b,k); c=Cast(e) to=9; y=If(c) then_branch={; a=Softmax(x) axis=0; -> a} else_branch={; a=Neg(x); -> a}; -> y[N,3]",
            ),
            "unknown If",
        ),
    ]);
}

#[test]
fn rows_are_followed_through_shapes_and_axes() {
    check(&[
        ("x[N,3]; y=Transpose(x) perm=1,0; z=Softmax(y) axis=0; t=Transpose(z) perm=1,0; -> t[N,3]", "independent"),
        ("x[N,2,6]; s=i(-1,6); y=Reshape(x,s); z=Softmax(y); t=i(-1,2,6); u=Reshape(z,t); -> u[N,2,6]", "independent"),
        // The rows are the inner factor of a middle axis.
        (
            "x[N,T,6]; y=Transpose(x) perm=1,0,2; s=i(-1,6); z=Reshape(y,s); w=f[6,6]; m=MatMul(z,w); q=Shape(y); \
             u=Reshape(m,q); v=Transpose(u) perm=1,0,2; -> v[N,T,6]",
            "independent",
        ),
        ("x[N,3]; y=Concat(x,x) axis=0; a,b=Split(y) axis=0; z=Sub(a,b); -> z[N,3]", "independent"),
        ("x[N,3]; a=i(0); b=i(9223372036854775807); y=Slice(x,a,b,a); -> y[N,3]", "independent"),
        ("x[N,1,3]; a=i(1); y=Squeeze(x,a); z=Unsqueeze(y,a); -> z[N,1,3]", "independent"),
        ("x[N,3,4]; y=Einsum(x,x) equation=\"bij,bkj->bik\"; -> y[N,3,3]", "independent"),
        ("x[N,3,4]; y=Einsum(x,x) equation=\"...j,...j->...\"; -> y[N,3]", "independent"),
        ("x[N,5]; k=i(2); v,i=TopK(x,k); -> v[N,2], i[N,2]", "independent"),
        ("x[N,5]; y=ArgMax(x) axis=1 keepdims=0; -> y[N]", "independent"),
        ("x[N,4]; a=i(1)!; y=CumSum(x,a); -> y[N,4]", "independent"),
        ("x[N,4]; l:i[N]; y=ReverseSequence(x,l) batch_axis=0 time_axis=1; -> y[N,4]", "independent"),
        (
            "x[N,8,8,3]; y=Transpose(x) perm=0,3,1,2; w=f[4,3,3,3]; c=Conv(y,w); z=Transpose(c) perm=0,2,3,1; -> z[N,6,6,4]",
            "independent",
        ),
    ]);
}

/// Before opset 13 a softmax normalises all axes from its own on.
#[test]
fn softmax_means_what_its_version_says() {
    let along_one = "x[N,3,4]; y=Transpose(x) perm=1,2,0; z=Softmax(y) axis=1; t=Transpose(z) perm=2,0,1; -> t[N,3,4]";
    check_with(12, &[(along_one, "mixed Softmax"), ("x[N,4]; y=Softmax(x); -> y[N,4]", "independent")]);
    check_with(13, &[(along_one, "independent"), ("x[N]; y=Softmax(x); -> y[N]", "mixed Softmax")]);
}

const ENCODER: &str = "ids:i[N,T]; mask:i[N,T]; words=f[50,8]; places=f[64,8]; g=f[8]; w=f[8,8]; i0=i(0); i1=i(1); i2=i(2); i12=i(1,2); one=f[1]; \
    e=Gather(words,ids); s=Shape(ids); t=Slice(s,i1,i2); p=Slice(places,i0,t,i0); a=Add(e,p); h=LayerNormalization(a,g,g); \
    m0=Cast(mask) to=1; m1=Unsqueeze(m0,i12); m2=Sub(one,m1); \
    q0=MatMul(h,w); b0=Gather(s,i0); l0=Gather(s,i1); hd=i(2,4); sh=Concat(b0,l0,hd) axis=0; q1=Reshape(q0,sh); q=Transpose(q1) perm=0,2,1,3; \
    k0=MatMul(h,w); k1=Reshape(k0,sh); k=Transpose(k1) perm=0,2,3,1; at=MatMul(q,k); am=Add(at,m2); sm=Softmax(am) axis=-1; \
    o0=MatMul(sm,q); o1=Transpose(o0) perm=0,2,1,3; fl=i(0,0,8); o2=Reshape(o1,fl); r=Add(h,o2); \
    mu=ReduceMean(r) axes=-1,; d=Sub(r,mu); va=Mul(d,d); vr=ReduceMean(va) axes=-1,; sd=Sqrt(vr); ln=Div(d,sd); ";

#[test]
fn common_exports_are_independent() {
    let encoder = format!("{ENCODER} k0_=i(0)!; cls=Gather(ln,k0_) axis=1; pool=Gemm(cls,w); -> ln[N,T,8], pool[N,8]");
    // Names in the style of tf2onnx: one for each dimension.
    let tensorflow =
        encoder.replace("ids:i[N,T]", "ids:i[unk__1,unk__2]").replace("mask:i[N,T]", "mask:i[unk__3,unk__4]");
    let nameless = encoder.replace("ids:i[N,T]", "ids:i[?,?]").replace("mask:i[N,T]", "mask:i[?,?]");
    check(&[
        (&encoder, "independent"),
        (&tensorflow, "independent"),
        (&nameless, "independent"),
        (
            "x[N,64]; a=f[64,32]; b=f[32]; c=f[32,10]; h=Gemm(x,a,b); r=Relu(h); o=Gemm(r,c); y=Softmax(o); -> y[N,10]",
            "independent",
        ),
        (
            "x[N,3,32,32]; w=f[8,3,3,3]; g=f[8]; f=f[8,10]; c=Conv(x,w,g) pads=1,1,1,1; n=BatchNormalization(c,g,g,g,g); r=Relu(n); \
             p=MaxPool(r) kernel_shape=2,2 strides=2,2; a=GlobalAveragePool(p); l=Flatten(a); y=Gemm(l,f); -> y[N,10]",
            "independent",
        ),
        (
            "x[N,T,4]; w=f[1,8,4]; r=f[1,8,2]; t=Transpose(x) perm=1,0,2; y,h=LSTM(t,w,r) hidden_size=2; a=i(1); q=Squeeze(y,a); \
             u=Transpose(q) perm=1,0,2; z=i(0); v=Squeeze(h,z); -> u[N,T,2], v[N,2]",
            "independent",
        ),
        ("x[?,4]; s=ml.Scaler(x); y=ml.TreeEnsembleRegressor(s) n_targets=1; -> y[?,1]", "independent"),
        (
            "x[?,4]; l,p=ml.LinearClassifier(x) classlabels_ints=0,1,2; n=ml.Normalizer(p); s=i(-1); m=Reshape(l,s); -> m[?], n[?,3]",
            "independent",
        ),
        // The label of the class with the largest score, as skl2onnx writes it.
        (
            "x[?,4]; w=f[4,3]; c=i(7,8,9); p=MatMul(x,w); a=ArgMax(p) axis=1; l=ml.ArrayFeatureExtractor(c,a); s=i(-1); y=Reshape(l,s); -> y[?], p[?,3]",
            "independent",
        ),
        ("x[?,4]; w=f[9,4]; k=i(2); d=ms.CDist(x,w); v,i=TopK(d,k) largest=0; -> v[?,2], i[?,2]", "independent"),
        (
            "x[N,6,8]; g=f[8]; y,a,b,s=ms.SkipLayerNormalization(x,x,g); z=ms.FastGelu(s); -> y[N,6,8], z[N,6,8]",
            "independent",
        ),
    ]);
}

#[test]
fn the_examples_are_independent() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    for name in ["models/mlp", "models/digits", "models/encoder", "exits/models/exits"] {
        let report = row_report(&examples.join(name).join("1/model.onnx")).unwrap();
        assert_eq!(report, RowReport { rows: Rows::Independent, random: Vec::new() }, "{name}");
    }
}

/// A function stands for its graph with the attributes of the call.
#[test]
fn functions_of_the_model_are_followed() {
    let of = |inner: &str, attribute: Option<AttributeProto>, call: &str| {
        let mut graph = model::graph(&format!("a; {inner}; -> b"));
        if let Some(attribute) = attribute {
            graph.node[0].attribute.push(attribute.encode_to_vec().into());
        }
        let (name, domain) = ("Thing".into(), "my".into());
        let (input, output) = (vec!["a".into()], vec!["b".into()]);
        let function = FunctionProto { name, domain, input, output, node: graph.node, ..FunctionProto::default() };
        let mut proto = ModelProto::decode(model(&format!("x[N,4]; y=my.Thing(x) {call}; -> y[N,4]"), 17)).unwrap();
        proto.functions.push(function.encode_to_vec().into());
        report_of(proto.encode_to_vec().into()).unwrap().rows
    };
    let axis = || {
        let (name, ref_attr_name) = ("axis".into(), "along".into());
        Some(AttributeProto { name, ref_attr_name, ..AttributeProto::default() })
    };
    let mixed_by = |rows: Rows| matches!(rows, Rows::Mixed(cause) if cause.operator == "Softmax");
    assert_eq!(of("b=Softmax(a)", axis(), "along=1"), Rows::Independent);
    assert!(mixed_by(of("b=Softmax(a)", axis(), "along=0")));
    assert_eq!(of("b=Softmax(a)", axis(), ""), Rows::Independent, "the last axis");
    assert!(matches!(of("b=my.Thing(a)", None, ""), Rows::Unknown(_)), "it calls itself");
}

#[test]
fn graphs_inside_of_operators_are_followed() {
    check(&[
        (
            "x[N,T]; s=Shape(x); o=i(1); w=Gather(s,o); e=Equal(w,o); \
             y=If(e) then_branch={; a=Neg(x); -> a} else_branch={; b=Relu(x); -> b}; -> y[N,T]",
            "independent",
        ),
        (
            "x[N,T]; m=ReduceMax(x) keepdims=0; z=f[1]; e=Greater(m,z); \
             y=If(e) then_branch={; a=Neg(x); -> a} else_branch={; b=Relu(x); -> b}; -> y[N,T]",
            "mixed ReduceMax",
        ),
        (
            "x[N,T]; n=i(3)!; c=i(1)!; y=Loop(n,c,x) body={i:i; c_:i; v; d=Identity(c_); r=Relu(v); -> d, r}; -> y[N,T]",
            "independent",
        ),
        (
            "x[N,T]; n=i(3)!; c=i(1)!; y=Loop(n,c,x) body={i:i; c_:i; v; d=Identity(c_); r=Softmax(v) axis=0; -> d, r}; -> y[N,T]",
            "mixed Softmax",
        ),
        (
            "x[N,T]; s=Shape(x); z=i(0)!; n=Gather(s,z); c=i(1)!; y=Loop(n,c,x) body={i:i; c_:i; v; d=Identity(c_); r=Relu(v); -> d, r}; -> y[N,T]",
            "unknown Loop",
        ),
        // One row after the other, with a state and without.
        (
            "x[N,3]; z=f[3]; s,y=Scan(z,x) num_scan_inputs=1 body={a; b; c=Add(a,b); d=Identity(c); -> c, d}; -> y[N,3]",
            "mixed Scan",
        ),
        (
            "x[N,3]; z=f[3]; s,y=Scan(z,x) num_scan_inputs=1 body={a; b; c=Identity(a); d=Sub(a,b); -> c, d}; -> y[N,3]",
            "independent",
        ),
        (
            "x[N,3]; z=f[3]; s,y=Scan(z,x) num_scan_inputs=1 scan_input_directions=1, body={a; b; c=Identity(a); d=Sub(a,b); -> c, d}; -> y[N,3]",
            "unknown Scan",
        ),
        // Along another axis, as a network with a state does.
        (
            "x[N,T,3]; h[N,3]; s,y=Scan(h,x) num_scan_inputs=1 scan_input_axes=1, scan_output_axes=1, \
             body={a; b; c=Add(a,b); d=Identity(c); -> c, d}; -> s[N,3], y[N,T,3]",
            "independent",
        ),
    ]);
}

#[test]
fn what_no_rule_covers_is_unknown() {
    check(&[
        ("x[N,4]; y=my.Thing(x); -> y[N,4]", "unknown Thing"),
        ("x[N,4]; y=Det(x); -> y[N]", "unknown Det"),
        ("x[N,2,4,8]; c[N,8]; p:i[N,4]; y=RotaryEmbedding(x,c,c,p); -> y[N,2,4,8]", "unknown RotaryEmbedding"),
        ("x[N,2,4,8]; c[N,4,4]; y=RotaryEmbedding(x,c,c); -> y[N,2,4,8]", "independent"),
        // The operator does not touch the rows.
        ("x[N,4]; w=f[4]; t=my.Thing(w); -> x[N,4]", "independent"),
        ("x; y=Relu(x); -> y", "unknown input"),
        ("x[2,4]; y=Relu(x); -> y[2,4]", "mixed input"),
    ]);
}

#[test]
fn names_of_dimensions_are_evidence() {
    check(&[
        // The graph proves more than the name shows.
        ("x[N,N]; y=Relu(x); -> y[N,N]", "independent"),
        ("x[N,N]; y=my.Thing(x); -> y[N,N]", "mixed input"),
        ("x[N,4]; y=my.Thing(x); -> y[M,N]", "mixed input"),
        ("x[N,4]; z[M,4]; y=my.Thing(x,z); -> y[N,4]", "mixed input"),
        ("x[unk__1,4]; z[unk__2,4]; y=my.Thing(x,z); -> y[N,4]", "unknown Thing"),
        ("x[unk__1,4]; z[unk__2,4]; y=Add(x,z); -> y[unk__3,4]", "independent"),
    ]);
}

#[test]
fn operators_that_draw_random_numbers_are_named() {
    let random = |text: &str| report_of(model(text, 17)).unwrap().random;
    assert_eq!(random("x[N,4]; r=RandomNormalLike(x); y=Add(x,r); -> y[N,4]"), ["RandomNormalLike"]);
    let dropout =
        |training: i64| format!("x[N,4]; r=f[1]; t=i({training})!; y=Dropout(x,r,t); b=Bernoulli(y); -> b[N,4]");
    assert_eq!(random(&dropout(1)), ["Bernoulli", "Dropout"]);
    assert_eq!(random(&dropout(0)), ["Bernoulli"]);
    assert!(random("x[N,4]; y=Dropout(x); -> y[N,4]").is_empty());
}

/// Random changes of bytes end in a report or in an error, and quickly.
#[test]
fn broken_bytes_end_in_words() {
    let seed: u64 = std::env::var("DOWNBEAT_ROWS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(5);
    println!("DOWNBEAT_ROWS_SEED={seed}");
    let mut state = seed | 1;
    let mut next = |below: usize| {
        // Xorshift (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let scan = "x[N,T,3]; h[N,3]; s,y=Scan(h,x) num_scan_inputs=1 scan_input_axes=1, body={a; b; c=Add(a,b); -> c, c}; -> s[N,3]";
    let small = "x[N,3]; k=i(1,0); y=Reshape(x,k); a=i(0); b=i(2); z=Slice(y,a,b,a,b); c,d=Split(z) axis=0; e=Concat(c,d) axis=-1; \
        t=Tile(e,k); u=Pad(t,k); v=Gather(u,k); p=Transpose(v) perm=1,0; q=Einsum(p,p) equation=\"ab,cb\"; -> q[N,M]";
    let seeds = [model(&format!("{ENCODER} -> ln[N,T,8]"), 17), model(scan, 17), model(small, 17)];
    for round in 0..3000 {
        let mut bytes = seeds[next(seeds.len())].to_vec();
        for _ in 0..=next(4) {
            let at = next(bytes.len());
            match next(4) {
                0 => bytes[at] ^= 1 << next(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][next(5)],
                2 => drop(bytes.remove(at)),
                _ => bytes.truncate(at.max(1)),
            }
        }
        if let Err(error) = report_of(Bytes::from(bytes)) {
            assert!(!error.is_empty(), "seed {seed}, round {round}");
        }
    }
}

/// Verdicts of loops in loops and of functions that call themselves come after bounded work.
#[test]
fn nested_graphs_end() {
    let mut body = String::from("i:i; c:i; v; d=Identity(c); r=Relu(v); -> d, r");
    for _ in 0..12 {
        body = format!("i:i; c:i; v; d=Identity(c); r=Loop(n,e,v) body={{{body}}}; -> d, r");
    }
    let text = format!("x[N,4]; n=i(3)!; e=i(1)!; y=Loop(n,e,x) body={{{body}}}; -> y[N,4]");
    assert_eq!(verdict(&text, 17), "independent");
}
