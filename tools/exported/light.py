"""Models of scikit-learn, LightGBM and XGBoost, exported as the packages' own pages say."""

import numpy as np
from skl2onnx import to_onnx
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, StringTensorType
from sklearn import cluster, compose, datasets, ensemble, feature_extraction, linear_model, naive_bayes, neighbors, neural_network, pipeline
from sklearn import preprocessing, svm, tree
from sklearn.decomposition import PCA

from .export import SEED, Export, Group

GROUP = Group()
PACKAGES = ("scikit-learn", "skl2onnx", "onnx", "numpy")
ROWS = 12


def iris(dtype=np.float32, names=False):
    """150 flowers: four numbers each, and their kind as a number or as a name."""
    data = datasets.load_iris()
    return data.data.astype(dtype), np.array(data.target_names)[data.target].astype(str) if names else data.target


def some(rows):
    """Rows of every kind of flower."""
    return rows[:: len(rows) // ROWS][:ROWS]


def sklearn(model, inputs, outputs, how, **more):
    return Export("scikit-learn", "skl2onnx", PACKAGES, model, inputs, outputs, how, **more)


def classifier(fitted, x, how, names=("output_label", "output_probability"), **options):
    """A classifier with the two outputs that skl2onnx gives it."""
    model = to_onnx(fitted, x[:1], **options)
    rows = some(x)
    return sklearn(model, {"X": rows}, dict(zip(names, (fitted.predict(rows), fitted.predict_proba(rows)))), how)


def regressor(fitted, x, how, **more):
    model = to_onnx(fitted, x[:1])
    return sklearn(model, {"X": some(x)}, {"variable": fitted.predict(some(x)).reshape(-1, 1)}, how, **more)


@GROUP.model
def sklearn_logistic():
    x, y = iris()
    return classifier(linear_model.LogisticRegression(max_iter=500).fit(x, y), x, "to_onnx(LogisticRegression, x[:1])")


@GROUP.model
def sklearn_logistic_names():
    x, y = iris(names=True)
    return classifier(linear_model.LogisticRegression(max_iter=500).fit(x, y), x, "to_onnx(LogisticRegression with names as classes, x[:1])")


@GROUP.model
def sklearn_logistic_columns():
    x, y = iris(names=True)
    fitted = linear_model.LogisticRegression(max_iter=500).fit(x, y)
    model = to_onnx(fitted, x[:1], options={"zipmap": "columns"})
    rows = some(x)
    outputs = {"output_label": fitted.predict(rows)}
    outputs |= {output.name: column for output, column in zip(model.graph.output[1:], fitted.predict_proba(rows).T)}
    return sklearn(model, {"X": rows}, outputs, "to_onnx(LogisticRegression, x[:1], options={'zipmap': 'columns'})")


@GROUP.model
def sklearn_forest():
    x, y = iris()
    return classifier(ensemble.RandomForestClassifier(20, random_state=SEED).fit(x, y), x, "to_onnx(RandomForestClassifier, x[:1])")


@GROUP.model
def sklearn_forest_tensor():
    x, y = iris(names=True)
    forest = ensemble.RandomForestClassifier(20, random_state=SEED).fit(x, y)
    return classifier(forest, x, "to_onnx(RandomForestClassifier, x[:1], options={'zipmap': False})", ("label", "probabilities"), options={"zipmap": False})


@GROUP.model
def sklearn_pipeline():
    """Passengers of a ship: numbers to scale, texts to encode."""
    random = np.random.default_rng(SEED)
    columns = {
        "age": random.uniform(1, 80, (200, 1)).astype(np.float32),
        "fare": random.lognormal(3, 1, (200, 1)).astype(np.float32),
        "sex": random.choice(["female", "male"], (200, 1)),
        "port": random.choice(["C", "Q", "S"], (200, 1)),
    }
    import pandas

    frame = pandas.DataFrame({name: column.ravel() for name, column in columns.items()})
    y = (frame["age"] / 80 + (frame["sex"] == "male") + random.normal(0, 0.3, 200) > 1).astype(int)
    texts = preprocessing.OneHotEncoder(handle_unknown="ignore")
    transformer = compose.ColumnTransformer([("numbers", preprocessing.StandardScaler(), ["age", "fare"]), ("texts", texts, ["sex", "port"])])
    fitted = pipeline.Pipeline([("columns", transformer), ("classifier", linear_model.LogisticRegression())]).fit(frame, y)
    types = [(name, (StringTensorType if column.dtype.kind == "U" else FloatTensorType)([None, 1])) for name, column in columns.items()]
    rows = frame[:ROWS]
    return sklearn(to_onnx(fitted, initial_types=types), {name: column[:ROWS] for name, column in columns.items()},
                   {"output_label": fitted.predict(rows), "output_probability": fitted.predict_proba(rows)},
                   "to_onnx(Pipeline(ColumnTransformer(StandardScaler, OneHotEncoder), LogisticRegression), initial_types=one for each column)")


@GROUP.model
def sklearn_svc():
    x, y = iris()
    fitted = svm.SVC(random_state=SEED).fit(x, y)
    model = to_onnx(fitted, x[:1])
    rows = some(x)
    scores = fitted.decision_function(rows)
    return sklearn(model, {"X": rows}, {"output_label": fitted.predict(rows), "output_probability": scores}, "to_onnx(SVC, x[:1])")


@GROUP.model
def sklearn_svr():
    x, _ = iris()
    return regressor(svm.SVR().fit(x[:, :3], x[:, 3]), x[:, :3], "to_onnx(SVR, x[:1])")


@GROUP.model
def sklearn_linear_svc():
    x, y = iris()
    fitted = svm.LinearSVC(random_state=SEED, max_iter=10_000).fit(x, y)
    model = to_onnx(fitted, x[:1])
    rows = some(x)
    return sklearn(model, {"X": rows}, {"label": fitted.predict(rows), "probabilities": fitted.decision_function(rows)}, "to_onnx(LinearSVC, x[:1])")


@GROUP.model
def sklearn_kmeans():
    x, _ = iris()
    fitted = cluster.KMeans(3, n_init=3, random_state=SEED).fit(x)
    rows = some(x)
    return sklearn(to_onnx(fitted, x[:1]), {"X": rows}, {"label": fitted.predict(rows), "scores": fitted.transform(rows)}, "to_onnx(KMeans, x[:1])",
                   tolerance=(1e-3, 1e-3), because="a distance is the root of a difference of large squares")


@GROUP.model
def sklearn_gradient_boosting():
    x, y = iris()
    fitted = ensemble.GradientBoostingClassifier(n_estimators=20, random_state=SEED).fit(x, y)
    return classifier(fitted, x, "to_onnx(GradientBoostingClassifier, x[:1])")


@GROUP.model
def sklearn_ridge():
    x, _ = iris()
    return regressor(linear_model.Ridge().fit(x[:, :3], x[:, 3]), x[:, :3], "to_onnx(Ridge, x[:1])")


@GROUP.model
def sklearn_forest_regressor():
    x, _ = iris()
    forest = ensemble.RandomForestRegressor(20, random_state=SEED).fit(x[:, :3], x[:, 3])
    return regressor(forest, x[:, :3], "to_onnx(RandomForestRegressor, x[:1])")


@GROUP.model
def sklearn_float64():
    """The default of NumPy: skl2onnx takes the datatype of the example."""
    x, _ = iris(np.float64)
    fitted = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LinearRegression()).fit(x[:, :3], x[:, 3])
    return regressor(fitted, x[:, :3], "to_onnx(Pipeline(StandardScaler, LinearRegression), x[:1]) with x of float64", tolerance=(1e-9, 1e-9),
                     because="double precision on both sides")


@GROUP.model
def sklearn_float64_classifier():
    x, y = iris(np.float64)
    fitted = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=500)).fit(x, y)
    model = to_onnx(fitted, initial_types=[("X", DoubleTensorType([None, 4]))])
    rows = some(x)
    return sklearn(model, {"X": rows}, {"output_label": fitted.predict(rows), "output_probability": fitted.predict_proba(rows)},
                   "to_onnx(Pipeline(StandardScaler, LogisticRegression), initial_types=DoubleTensorType)",
                   because="LinearClassifier of the standard computes in single precision")


@GROUP.model
def sklearn_mlp():
    x, y = iris()
    return classifier(neural_network.MLPClassifier((16,), max_iter=800, random_state=SEED).fit(x, y), x, "to_onnx(MLPClassifier, x[:1])")


@GROUP.model
def sklearn_knn():
    x, y = iris()
    return classifier(neighbors.KNeighborsClassifier().fit(x, y), x, "to_onnx(KNeighborsClassifier, x[:1])")


@GROUP.model
def sklearn_tree():
    x, y = iris(names=True)
    return classifier(tree.DecisionTreeClassifier(random_state=SEED).fit(x, y), x, "to_onnx(DecisionTreeClassifier, x[:1])")


@GROUP.model
def sklearn_bayes():
    x, y = iris()
    return classifier(naive_bayes.GaussianNB().fit(x, y), x, "to_onnx(GaussianNB, x[:1])")


@GROUP.model
def sklearn_isolation_forest():
    x, _ = iris()
    fitted = ensemble.IsolationForest(n_estimators=20, random_state=SEED).fit(x)
    rows = some(x)
    model = to_onnx(fitted, x[:1], target_opset={"": 18, "ai.onnx.ml": 3})
    return sklearn(model, {"X": rows}, {"label": fitted.predict(rows).reshape(-1, 1), "scores": fitted.decision_function(rows).reshape(-1, 1)},
                   "to_onnx(IsolationForest, x[:1], target_opset={'': 18, 'ai.onnx.ml': 3})")


@GROUP.model
def sklearn_pca():
    x, _ = iris()
    fitted = pipeline.make_pipeline(preprocessing.StandardScaler(), PCA(2, random_state=SEED)).fit(x)
    return sklearn(to_onnx(fitted, x[:1]), {"X": some(x)}, {"variable": fitted.transform(some(x))}, "to_onnx(Pipeline(StandardScaler, PCA), x[:1])")


@GROUP.model
def sklearn_texts():
    """Short texts to a mood, by the words in them."""
    good, bad = "good great fine lovely happy warm".split(), "bad awful poor sad cold grim".split()
    random = np.random.default_rng(SEED)
    texts = np.array([" ".join(random.choice(words, 4)) for words in (good, bad) for _ in range(40)])
    y = np.repeat(["good", "bad"], 40)
    fitted = pipeline.make_pipeline(feature_extraction.text.TfidfVectorizer(), linear_model.LogisticRegression()).fit(texts, y)
    rows = texts[::8]
    model = to_onnx(fitted, initial_types=[("text", StringTensorType([None]))])
    return sklearn(model, {"text": rows}, {"output_label": fitted.predict(rows), "output_probability": fitted.predict_proba(rows)},
                   "to_onnx(Pipeline(TfidfVectorizer, LogisticRegression), initial_types=StringTensorType([None]))")


def onnxmltools_export(framework, package, convert, fitted, x, outputs, how):
    from onnxmltools.convert.common.data_types import FloatTensorType as Floats

    model = convert(fitted, initial_types=[("input", Floats([None, x.shape[1]]))])
    return Export(framework, "onnxmltools", (package, "onnxmltools", "onnx", "numpy"), model, {"input": some(x)}, outputs, how)


def lightgbm(fitted, x, outputs, how):
    from onnxmltools import convert_lightgbm

    return onnxmltools_export("LightGBM", "lightgbm", convert_lightgbm, fitted, x, outputs, how)


def xgboost(fitted, x, outputs, how):
    from onnxmltools import convert_xgboost

    return onnxmltools_export("XGBoost", "xgboost-cpu", convert_xgboost, fitted, x, outputs, how)


@GROUP.model
def lightgbm_classifier():
    from lightgbm import LGBMClassifier

    x, y = iris()
    fitted = LGBMClassifier(n_estimators=20, random_state=SEED, verbose=-1, n_jobs=1).fit(x, y)
    outputs = {"label": fitted.predict(some(x)), "probabilities": fitted.predict_proba(some(x))}
    return lightgbm(fitted, x, outputs, "onnxmltools.convert_lightgbm(LGBMClassifier, initial_types=FloatTensorType([None, 4]))")


@GROUP.model
def lightgbm_binary():
    from lightgbm import LGBMClassifier

    x, y = iris()
    fitted = LGBMClassifier(n_estimators=20, random_state=SEED, verbose=-1, n_jobs=1).fit(x, (y == 1).astype(int))
    outputs = {"label": fitted.predict(some(x)).astype(np.int64), "probabilities": fitted.predict_proba(some(x))}
    return lightgbm(fitted, x, outputs, "onnxmltools.convert_lightgbm(LGBMClassifier of two classes, ...)")


@GROUP.model
def lightgbm_regressor():
    from lightgbm import LGBMRegressor

    x, _ = iris()
    fitted = LGBMRegressor(n_estimators=20, random_state=SEED, verbose=-1, n_jobs=1).fit(x[:, :3], x[:, 3])
    outputs = {"variable": fitted.predict(some(x[:, :3])).reshape(-1, 1)}
    return lightgbm(fitted, x[:, :3], outputs, "onnxmltools.convert_lightgbm(LGBMRegressor, initial_types=FloatTensorType([None, 3]))")


@GROUP.model
def xgboost_classifier():
    from xgboost import XGBClassifier

    x, y = iris()
    fitted = XGBClassifier(n_estimators=20, random_state=SEED, n_jobs=1).fit(x, y)
    outputs = {"label": fitted.predict(some(x)), "probabilities": fitted.predict_proba(some(x))}
    return xgboost(fitted, x, outputs, "onnxmltools.convert_xgboost(XGBClassifier, initial_types=FloatTensorType([None, 4]))")


@GROUP.model
def xgboost_binary():
    from xgboost import XGBClassifier

    x, y = iris()
    fitted = XGBClassifier(n_estimators=20, random_state=SEED, n_jobs=1).fit(x, (y == 1).astype(int))
    outputs = {"label": fitted.predict(some(x)).astype(np.int64), "probabilities": fitted.predict_proba(some(x))}
    return xgboost(fitted, x, outputs, "onnxmltools.convert_xgboost(XGBClassifier of two classes, ...)")


@GROUP.model
def xgboost_regressor():
    from xgboost import XGBRegressor

    x, _ = iris()
    fitted = XGBRegressor(n_estimators=20, random_state=SEED, n_jobs=1).fit(x[:, :3], x[:, 3])
    outputs = {"variable": fitted.predict(some(x[:, :3])).reshape(-1, 1)}
    return xgboost(fitted, x[:, :3], outputs, "onnxmltools.convert_xgboost(XGBRegressor, initial_types=FloatTensorType([None, 3]))")
